#include "pannier/engine/random_states.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <string>

#include "pannier/engine/checkpoint_tensors.h"

namespace pannier {
namespace {

std::vector<c10::Device> devices_with(c10::Device device) {
  std::vector<c10::Device> devices{c10::Device(c10::DeviceType::CPU)};
  if (!device.is_cpu()) {
    devices.push_back(device);
  }
  return devices;
}

// One name for all GPUs: a run may go on on another.
std::string name_of(c10::Device device) { return kRandomPrefix + std::string(device.is_cpu() ? "cpu" : "cuda"); }

}  // namespace

std::vector<NamedTensor> random_states(c10::Device device) {
  std::vector<NamedTensor> states;
  for (const auto& each : devices_with(device)) {
    at::Generator generator = at::globalContext().defaultGenerator(each);
    const std::lock_guard lock(generator.mutex());
    states.push_back({name_of(each), generator.get_state()});
  }
  return states;
}

void restore_random_states(const ckpt::SafetensorsReader& extra, c10::Device device) {
  for (const auto& each : devices_with(device)) {
    if (const auto* entry = extra.find(name_of(each)); entry != nullptr) {
      at::Generator generator = at::globalContext().defaultGenerator(each);
      const std::lock_guard lock(generator.mutex());
      generator.set_state(read_extra(extra, *entry));
    }
  }
}

at::Tensor read_extra(const ckpt::SafetensorsReader& extra, const ckpt::SafetensorsEntry& entry) {
  const at::Tensor tensor = at::empty(entry.info.shape, torch_dtype(entry.info.dtype));
  extra.read(entry.info.name, 0, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  return tensor;
}

}  // namespace pannier
