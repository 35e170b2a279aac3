// The TorchBind classes that Python sees: thin holders whose methods call the engine and turn its errors into those
// that torch carries to Python with their type. One library serves every Python version, and the interpreter lock is
// released around every call.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"
#include "pannier/engine/engine_core.h"

namespace pannier::binding {

using Numbers = c10::Dict<std::string, double>;

/// While it lives, what is made is an ordinary tensor, in torch.inference_mode() too: the engine keeps it for longer.
class OrdinaryTensors {
 public:
  OrdinaryTensors() {
    if (c10::InferenceMode::is_enabled()) {
      mode_.emplace(false);
      no_grad_.emplace();
    }
  }

 private:
  std::optional<c10::InferenceMode> mode_;
  std::optional<c10::NoGradGuard> no_grad_;
};

/// Runs `body` and rethrows our errors as torch's: ConfigError as ValueError, OutOfMemoryError as OutOfMemoryError, the
/// others as RuntimeError with a mark that the Python package reads.
template <class Body>
auto translated(Body&& body) -> decltype(body()) {
  const OrdinaryTensors ordinary;
  try {
    return body();
  } catch (const ConfigError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const OutOfMemoryError& error) {
    C10_THROW_ERROR(OutOfMemoryError, error.what());
  } catch (const IoError& error) {
    C10_THROW_ERROR(Error, fmt::format("[pannier:io:{}] {}", error.error_number(), error.what()));
  } catch (const InternalError& error) {
    C10_THROW_ERROR(Error, fmt::format("[pannier:internal] {}", error.what()));
  } catch (const CollectiveError& error) {
    C10_THROW_ERROR(Error, fmt::format("[pannier:collective] {}", error.what()));
  } catch (const LossScaleError& error) {
    C10_THROW_ERROR(Error, error.what());
  }
}

/// The update rule of that name, none for an empty one. Throws ConfigError for a name that is none.
[[nodiscard]] std::optional<kernels::Algorithm> algorithm_of(const std::string& rule);

/// A configuration with its batch sizes.
class ConfigHolder : public torch::CustomClassHolder {
 public:
  explicit ConfigHolder(const std::string& text);
  [[nodiscard]] std::vector<std::string> notes() const { return config.notes; }
  [[nodiscard]] std::string json() const { return config.to_json(); }
  /// Completes the batch sizes; `loader_batch` 0 is unknown.
  void resolve_batch(std::int64_t world_size, std::int64_t loader_batch);
  /// Throws where a key that decides something for what the configuration itself builds was left "auto".
  void require_resolved(bool builds_optimizer, bool builds_schedule) const;

  Config config;
  BatchSizes batch;
};

/// A learning-rate schedule.
class ScheduleHolder : public torch::CustomClassHolder {
 public:
  /// `params_json` holds the fields of the scheduler section's "params".
  ScheduleHolder(const std::string& type, const std::string& params_json, std::vector<double> base_lrs);

  Schedule schedule;
};

/// An engine over the parameters of a Python module.
class EngineHolder : public torch::CustomClassHolder {
 public:
  EngineHolder(const c10::intrusive_ptr<ConfigHolder>& config, const std::string& rule, std::vector<std::string> names,
               std::vector<at::Tensor> parameters, const std::vector<std::int64_t>& group_of,
               const c10::List<Numbers>& groups, std::vector<at::Tensor> buffers, const std::string& device,
               const std::vector<std::vector<std::int64_t>>& units, std::vector<at::Tensor> shares,
               const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& ranks);

  EngineCore core;
};

/// A parameter group's values; keys are the fields of Hyperparameters, missing ones keep their defaults.
[[nodiscard]] std::vector<kernels::Hyperparameters> to_hyperparameters(const c10::List<Numbers>& groups);

}  // namespace pannier::binding
