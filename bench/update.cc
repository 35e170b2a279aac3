// How close the AdamW update comes to what this machine's memory allows: bf16 gradient, bf16 parameter with its
// lossless rest, fp32 moments, a clipping factor; 26 bytes of memory traffic a parameter in one pass. The yardstick is
// the best of several honest copies, bytes read and written both counted. Copy and update alternate; medians are
// printed as JSON lines.
//
// usage: bench_update [threads (default: all cores)] [mebi-parameters (64)] [rounds (9)] [target]
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/copy_kernels.h"
#include "pannier/kernels/gradient.h"
#include "pannier/kernels/reference.h"
#include "pannier/kernels/update.h"

namespace pannier {
namespace {

using kernels::Algorithm;
using kernels::StateFormat;

constexpr double kBytesPerParameter = 26;  // Read hi, lo, m, v, gradient (14); write hi, lo, m, v (12).

/// Huge-page memory, touched by the team that will use it. Streams whose distance is a multiple of 128 MiB hit the same
/// DRAM banks, which halves the speed of an update; so each buffer begins a few pages further into its mapping.
class Buffer {
 public:
  Buffer(std::size_t nbytes, int index, ThreadTeam& team)
      : nbytes_(nbytes), offset_(static_cast<std::size_t>(index) * (std::size_t{64} << 10)) {
    mapping_ = mmap(nullptr, nbytes + offset_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    PANNIER_CHECK(mapping_ != MAP_FAILED, fmt::format("no memory for {} bytes", nbytes));
    madvise(mapping_, nbytes + offset_, MADV_HUGEPAGE);
    team.run(static_cast<std::int64_t>(nbytes), 1 << 21, [this](std::int64_t begin, std::int64_t end) {
      std::memset(as<char>() + begin, 0, static_cast<std::size_t>(end - begin));
    });
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { munmap(mapping_, nbytes_ + offset_); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(static_cast<char*>(mapping_) + offset_);
  }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::size_t nbytes_;
  std::size_t offset_;
  void* mapping_ = nullptr;
};

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The state of `numel` parameters in bf16 with its exact rest.
struct State {
  State(std::int64_t num_elements, ThreadTeam& team)
      : numel(num_elements),
        hi(bytes(2), 0, team),
        lo(bytes(2), 1, team),
        m(bytes(4), 2, team),
        v(bytes(4), 3, team),
        grad(bytes(2), 4, team) {
    team.run(numel, 1, [this](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto noise = static_cast<std::uint32_t>(i) * 2654435761U;
        hi.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(0x3C00U + (noise >> 24));
        grad.as<std::uint16_t>()[i] =
            static_cast<std::uint16_t>((noise << 15 & 0x8000U) | (0x3A00U + (noise >> 20 & 0xFFU)));
      }
    });
  }
  std::size_t bytes(std::size_t element) const { return static_cast<std::size_t>(numel) * element; }
  kernels::UpdateBuffers buffers() const {
    return {hi.as<void>(), lo.as<void>(), m.as<float>(), v.as<float>(), grad.as<void>(), kernels::GradType::kBf16,
            numel};
  }

  std::int64_t numel;
  Buffer hi, lo, m, v, grad;
};

kernels::UpdateCoefficients coefficients(std::int64_t step) {
  kernels::Hyperparameters hyper;
  hyper.weight_decay = 0.01;
  return make_coefficients(Algorithm::kAdamW, hyper, step, 0.73F);
}

void verify(ThreadTeam& team, const std::string& target) {
  constexpr std::int64_t kNumel = 100003;
  const State actual(kNumel, team);
  const State expected(kNumel, team);
  for (std::int64_t step = 1; step <= 3; ++step) {
    update_all(Algorithm::kAdamW, StateFormat::kBf16, {{coefficients(step), actual.buffers()}}, team.parallel_for(),
               target);
    kernels::reference::update(Algorithm::kAdamW, StateFormat::kBf16, coefficients(step), expected.buffers());
  }
  for (const auto& [a, b] : {std::pair(&actual.hi, &expected.hi), std::pair(&actual.lo, &expected.lo),
                             std::pair(&actual.m, &expected.m), std::pair(&actual.v, &expected.v)}) {
    PANNIER_CHECK(std::memcmp(a->as<char>(), b->as<char>(), a->nbytes()) == 0, "the update differs from the reference");
  }
}

void run(int num_threads, std::int64_t numel, int rounds, const std::string& target) {
  ThreadTeam team(num_threads);
  verify(team, target);
  const State state(numel, team);
  const std::size_t copy_nbytes = static_cast<std::size_t>(numel) * 8;
  const Buffer from(copy_nbytes, 5, team);
  const Buffer to(copy_nbytes, 6, team);
  const auto copies = available_copy_kernels();
  std::vector<std::vector<double>> copy_rates(copies.size());
  std::vector<double> update_seconds;
  std::vector<double> norm_seconds;
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const double seconds = seconds_of([&] {
        team.run(static_cast<std::int64_t>(copy_nbytes / 64), 1, [&](std::int64_t begin, std::int64_t end) {
          copies[i].copy(to.as<std::byte>() + begin * 64, from.as<std::byte>() + begin * 64,
                         static_cast<std::size_t>(end - begin) * 64);
        });
      });
      copy_rates[i].push_back(2 * static_cast<double>(copy_nbytes) / seconds / 1e9);
    }
    update_seconds.push_back(seconds_of([&] {
      update_all(Algorithm::kAdamW, StateFormat::kBf16, {{coefficients(round + 1), state.buffers()}},
                 team.parallel_for(), target);
    }));
    norm_seconds.push_back(seconds_of([&] {
      static_cast<void>(
          gradient_stats(state.grad.as<void>(), kernels::GradType::kBf16, numel, team.parallel_for(), target));
    }));
  }
  double best_copy = 0;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    best_copy = std::max(best_copy, median(copy_rates[i]));
    fmt::print("{{\"bench\": \"copy\", \"kernel\": \"{}\", \"threads\": {}, \"gb_per_s\": {:.2f}}}\n", copies[i].name,
               num_threads, median(copy_rates[i]));
  }
  const double rate = static_cast<double>(numel) / median(update_seconds);
  const double gb_per_s = rate * kBytesPerParameter / 1e9;
  fmt::print("{{\"bench\": \"norm\", \"type\": \"bf16\", \"threads\": {}, \"giga_params_per_s\": {:.3f}}}\n",
             num_threads, static_cast<double>(numel) / median(norm_seconds) / 1e9);
  fmt::print(
      "{{\"bench\": \"update\", \"rule\": \"AdamW\", \"format\": \"exact bf16\", \"target\": \"{}\", \"threads\": {}, "
      "\"params\": {}, \"giga_params_per_s\": {:.3f}, \"bytes_per_param\": {}, \"gb_per_s\": {:.2f}, "
      "\"percent_of_copy\": {:.1f}}}\n",
      target.empty() ? kernels::available_targets().front() : target, num_threads, numel, rate / 1e9,
      kBytesPerParameter, gb_per_s, 100 * gb_per_s / best_copy);
}

}  // namespace
}  // namespace pannier

int main(int argc, char** argv) {
  const auto argument = [&](int i, int fallback) { return i < argc ? std::atoi(argv[i]) : fallback; };
  const int num_threads = argument(1, static_cast<int>(std::thread::hardware_concurrency()));
  const std::int64_t numel = std::int64_t{argument(2, 64)} << 20;
  pannier::run(num_threads, numel, argument(3, 9), argc > 4 ? argv[4] : "");
}
