// Compiled with OpenMP, in a file of its own: without it the header-only at::parallel_for silently runs everything on
// the calling thread.
#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>

#include "pannier/device/compute.h"
#include "pannier/hardware/host_info.h"

#if !defined(_OPENMP)
#error "at::parallel_for needs -fopenmp to use torch's thread pool"
#endif

namespace pannier {

ParallelFor torch_parallel_for() {
  return [](std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  };
}

ParallelFor torch_parallel_for(int most_threads) {
  return [most_threads](std::int64_t count, std::int64_t grain,
                        const std::function<void(std::int64_t, std::int64_t)>& body) {
    const std::int64_t piece = std::max<std::int64_t>(1, grain);
    const std::int64_t num_pieces = (count + piece - 1) / piece;
    std::atomic<std::int64_t> next{0};
    std::exception_ptr first_error;
    std::mutex error_mutex;
    const auto work = [&] {
      try {
        for (std::int64_t i = next.fetch_add(1); i < num_pieces; i = next.fetch_add(1)) {
          body(i * piece, std::min(count, (i + 1) * piece));
        }
      } catch (...) {
        next = num_pieces;  // The others end with the pieces at hand.
        const std::lock_guard lock(error_mutex);
        first_error = first_error ? first_error : std::current_exception();
      }
    };
    const auto num_threads = static_cast<int>(std::min<std::int64_t>(num_pieces, std::max(1, most_threads)));
    if (num_threads <= 1 || omp_in_parallel() != 0) {
      work();
    } else {
#pragma omp parallel num_threads(num_threads)
      work();
    }
    if (first_error) {
      std::rethrow_exception(first_error);
    }
  };
}

int host_threads(const std::function<const char*(const char*)>& environment, int num_cores) {
  const int pool = at::get_num_threads();
  const char* ranks = environment("LOCAL_WORLD_SIZE");
  if (pool > 1 || ranks == nullptr || environment("TORCHELASTIC_RUN_ID") == nullptr) {
    return std::max(1, pool);
  }
  const int num_ranks = std::atoi(ranks);  // NOLINT(cert-err34-c): what is no number is no rank beside this one
  return num_ranks > 1 ? std::max(1, num_cores / num_ranks) : 1;
}

int host_threads() {
  static const int num_cores = probe_host().usable_cores;
  return host_threads([](const char* name) -> const char* { return std::getenv(name); }, num_cores);
}

}  // namespace pannier
