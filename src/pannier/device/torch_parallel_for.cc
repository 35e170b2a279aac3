// Compiled with OpenMP, in a file of its own: without it the header-only at::parallel_for silently runs everything on
// the calling thread.
#include <ATen/Parallel.h>

#include "pannier/device/compute.h"

#if !defined(_OPENMP)
#error "at::parallel_for needs -fopenmp to use torch's thread pool"
#endif

namespace pannier {

ParallelFor torch_parallel_for() {
  return [](std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  };
}

}  // namespace pannier
