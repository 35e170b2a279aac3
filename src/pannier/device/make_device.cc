#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "pannier/base/error.h"
#include "pannier/device/device.h"

namespace pannier {
namespace {

using MakeCudaDevice = Device* (*)(int index);

// libpannier_cuda.so lies beside the library that this function is in.
std::filesystem::path cuda_library() {
  Dl_info info{};
  const bool is_known = dladdr(reinterpret_cast<const void*>(&cuda_library), &info) != 0 && info.dli_fname != nullptr;
  return (is_known ? std::filesystem::path(info.dli_fname).parent_path() : std::filesystem::path()) /
         "libpannier_cuda.so";
}

MakeCudaDevice load_cuda() {
  static const MakeCudaDevice make = [] {
    const auto path = cuda_library();
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw ConfigError(fmt::format("the model is on a GPU, but {} could not be loaded: {}", path.string(), dlerror()));
    }
    return reinterpret_cast<MakeCudaDevice>(dlsym(library, "pannier_make_cuda_device"));
  }();
  return make;
}

}  // namespace

std::unique_ptr<Device> make_device(c10::Device device) {
  if (device.is_cpu()) {
    return make_metered_cpu();
  }
  if (!device.is_cuda()) {
    throw ConfigError(fmt::format("the model is on {}, expected a CPU or a CUDA device", device.str()));
  }
  return std::unique_ptr<Device>(load_cuda()(device.has_index() ? device.index() : 0));
}

}  // namespace pannier
