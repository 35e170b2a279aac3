// What only a run can decide: the batch sizes of its world, keys left "auto", and what this version can't run.
#include <fmt/format.h>

#include "pannier/base/error.h"
#include "pannier/engine/config.h"
#include "pannier/engine/config_report.h"

namespace pannier {
namespace {

// The three sizes while they are worked out; empty: not known yet.
struct Sizes {
  std::optional<std::int64_t> train;
  std::optional<std::int64_t> micro;
  std::optional<std::int64_t> accumulation;
  std::int64_t world = 1;

  [[noreturn]] void fail(const std::string& why) const {
    const auto text = [](const std::optional<std::int64_t>& size) { return size ? fmt::format("{}", *size) : "-"; };
    throw ConfigError(fmt::format(
        "batch sizes: train_batch_size {}, train_micro_batch_size_per_gpu {}, gradient_accumulation_steps {}, "
        "world size {}: {}",
        text(train), text(micro), text(accumulation), world, why));
  }

  // train / (factor * world), which must be whole; `missing` names the key that the quotient is for.
  [[nodiscard]] std::int64_t quotient(std::int64_t factor, const char* missing) const {
    if (*train % (factor * world) != 0) {
      fail(fmt::format("{} is not a multiple of {} * {}, so there is no whole {}", *train, factor, world, missing));
    }
    return *train / (factor * world);
  }

  void check_product() const {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(*micro, *accumulation, &product) || __builtin_mul_overflow(product, world, &product)) {
      fail("the product is too large");
    }
    if (*train != product) {
      fail(fmt::format("{} != {} * {} * {}", *train, *micro, *accumulation, world));
    }
  }
};

std::optional<std::int64_t> micro_batch(const Config& config, std::optional<std::int64_t> loader_batch) {
  const bool nothing_given = !config.train_batch_size && !config.gradient_accumulation_steps;
  const bool may_ask = config.auto_batch.micro || config.auto_batch.train || nothing_given;
  if (config.train_micro_batch_size_per_gpu || !may_ask) {
    return config.train_micro_batch_size_per_gpu;
  }
  return loader_batch;
}

void require_positive(std::optional<std::int64_t> loader_batch) {
  if (loader_batch && *loader_batch <= 0) {
    throw ConfigError(fmt::format("batch sizes: the batch of the loader must be positive, got {}", *loader_batch));
  }
}

}  // namespace

BatchSizes Config::resolve_batch(int world_size, std::optional<std::int64_t> loader_batch) const {
  PANNIER_CHECK(world_size > 0, fmt::format("world size {}", world_size));
  require_positive(loader_batch);
  Sizes sizes{train_batch_size, micro_batch(*this, loader_batch), gradient_accumulation_steps, world_size};
  if (!sizes.micro) {
    const bool waits = auto_batch.micro || (!sizes.train && (auto_batch.train || !sizes.accumulation));
    const bool follows = sizes.train && (sizes.accumulation || !auto_batch.micro);
    if (!sizes.train && !waits) {
      sizes.fail("train_batch_size or train_micro_batch_size_per_gpu must be given");
    }
    if (!follows) {
      if (sizes.train) {
        (void)sizes.quotient(1, "train_micro_batch_size_per_gpu");
      }
      return {.train = 0, .micro = 0, .accumulation = sizes.accumulation.value_or(1), .complete = false};
    }
    sizes.accumulation = sizes.accumulation.value_or(1);
    sizes.micro = sizes.quotient(*sizes.accumulation, "train_micro_batch_size_per_gpu");
  }
  if (!sizes.accumulation) {
    sizes.accumulation = sizes.train ? sizes.quotient(*sizes.micro, "gradient_accumulation_steps") : 1;
  }
  if (!sizes.train) {
    std::int64_t product = 0;
    const bool overflows = __builtin_mul_overflow(*sizes.micro, *sizes.accumulation, &product) ||
                           __builtin_mul_overflow(product, sizes.world, &product);
    if (overflows) {
      sizes.fail("the product is too large");
    }
    sizes.train = product;
  }
  sizes.check_product();
  return {.train = *sizes.train, .micro = *sizes.micro, .accumulation = *sizes.accumulation};
}

void Config::require_resolved(bool builds_optimizer, bool builds_schedule) const {
  std::vector<std::string> errors;
  for (const LeftOverAuto& key : left_over_autos) {
    if (key.use == AutoUse::kAlways || (key.use == AutoUse::kOptimizer && builds_optimizer) ||
        (key.use == AutoUse::kSchedule && builds_schedule)) {
      errors.push_back(fmt::format("{}: still \"auto\", and it decides something; write a value", key.path));
    }
  }
  if (!errors.empty()) {
    throw ConfigError(config::join_errors("configuration", errors));
  }
}

void Config::require_supported() const {
  std::vector<std::string> errors;
  const auto refuse = [&errors](bool asked, const char* text) {
    if (asked) {
      errors.emplace_back(text);
    }
  };
  refuse(zero.optimizer_home == Home::kNvme && pannier.streamed_share.value_or(0.0) > 0.0 && pannier.overlap_step,
         "pannier.streamed_share with pannier.overlap_step: of states on a disk one or the other; leave streamed_share "
         "out, or set zero_optimization.offload_optimizer.device to \"cpu\"");
  refuse(
      zero.param_home == Home::kNvme && pannier.overlap_step,
      "pannier.overlap_step with zero_optimization.offload_param.device \"nvme\" is not supported by this version; set "
      "overlap_step to false, or the device to \"cpu\"");
  refuse(zero.ratio < 1.0,
         "zero_optimization.offload_optimizer.ratio: this version does not split states by a ratio; leave it out, and "
         "set pannier.device_memory to say how much the device may hold");
  if (!errors.empty()) {
    throw ConfigError(config::join_errors("configuration", errors));
  }
}

}  // namespace pannier
