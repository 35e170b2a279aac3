// What the kernel tests share: awkward numbers, and the buffers of one run filled with them.
#pragma once

#include <bit>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "pannier/kernels/reference_bits.h"
#include "pannier/kernels/update.h"
#include "tests/kernels/fenced_buffer.h"

namespace pannier::testing {

using kernels::Algorithm;
using kernels::GradType;
using kernels::StateFormat;

/// Random numbers of a training's sizes, mixed with NaNs, infinities, denormals, zeros and extremes.
inline float awkward(std::mt19937& random) {
  const std::uint32_t roll = random() % 32;
  const auto any_bits = static_cast<std::uint32_t>(random());
  switch (roll) {
    case 0:
      return std::bit_cast<float>(0x7F800001U | (any_bits & 0x807FFFFFU));  // NaN of either sign and any payload.
    case 1:
      return std::bit_cast<float>(0x7F800000U | (any_bits & 0x80000000U));
    case 2:
      return std::bit_cast<float>(any_bits & 0x807FFFFFU);  // Denormal.
    case 3:
      return std::bit_cast<float>(any_bits & 0x80000000U);
    case 4:
      return std::bit_cast<float>(any_bits);
    case 5:
      return std::bit_cast<float>(0x7F7F0000U | (any_bits & 0x8000FFFFU));  // Close to the largest.
    case 6:
      return std::bit_cast<float>(0x00800000U + (any_bits & 0x801FFFFFU));  // Close to the smallest normal.
    default:
      return std::normal_distribution<float>(0.0F, roll < 20 ? 1.0F : 1e-4F)(random);
  }
}

inline std::size_t grad_nbytes(GradType type) { return type == GradType::kFp32 ? 4 : 2; }

inline void fill_gradient(FencedBuffer& grad, GradType type, std::mt19937& random) {
  const std::size_t numel = grad.nbytes() / grad_nbytes(type);
  for (std::size_t i = 0; i < numel; ++i) {
    const float x = awkward(random);
    if (type == GradType::kFp32) {
      grad.as<float>()[i] = x;
    } else if (type == GradType::kBf16) {
      grad.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
    } else {
      grad.as<std::uint16_t>()[i] =
          random() % 8 == 0 ? static_cast<std::uint16_t>(random()) : kernels::reference::to_fp16(x);
    }
  }
}

/// An update rule as the tests walk it.
struct Rule {
  std::string name;
  Algorithm algorithm;
  kernels::Hyperparameters hyper;
  int num_states;
};

inline std::vector<Rule> all_rules() {
  kernels::Hyperparameters decayed;
  decayed.lr = 3e-3;
  decayed.weight_decay = 0.1;
  kernels::Hyperparameters momentum = decayed;
  momentum.momentum = 0.9;
  momentum.dampening = 0.25;
  kernels::Hyperparameters nesterov = momentum;
  nesterov.dampening = 0;
  nesterov.nesterov = true;
  kernels::Hyperparameters adagrad = decayed;
  adagrad.lr_decay = 0.01;
  kernels::Hyperparameters undecayed = decayed;
  undecayed.weight_decay = 0;
  return {{"AdamW", Algorithm::kAdamW, decayed, 2},      {"AdamWUndecayed", Algorithm::kAdamW, undecayed, 2},
          {"Adam", Algorithm::kAdam, decayed, 2},        {"Sgd", Algorithm::kSgd, decayed, 0},
          {"SgdMomentum", Algorithm::kSgd, momentum, 1}, {"SgdNesterov", Algorithm::kSgd, nesterov, 1},
          {"Adagrad", Algorithm::kAdagrad, adagrad, 1},  {"Lion", Algorithm::kLion, decayed, 1}};
}

/// Format and gradient types that occur together.
struct Storage {
  StateFormat format;
  GradType grad_type;
};

inline std::vector<Storage> all_storages() {
  return {{StateFormat::kFp32, GradType::kFp32}, {StateFormat::kFp32, GradType::kFp16},
          {StateFormat::kFp32, GradType::kBf16}, {StateFormat::kFp16, GradType::kFp32},
          {StateFormat::kFp16, GradType::kFp16}, {StateFormat::kBf16, GradType::kFp32},
          {StateFormat::kBf16, GradType::kBf16}};
}

/// Owns the buffers of one run. A copy is deep.
struct RunBuffers {
  RunBuffers(const Rule& rule, Storage storage, std::int64_t numel, std::mt19937& random)
      : grad_type(storage.grad_type),
        num_elements(numel),
        num_states(rule.num_states),
        param(bytes(numel, storage.format == StateFormat::kFp32 ? 4 : 2)),
        rest(bytes(numel, storage.format == StateFormat::kFp16   ? 4
                          : storage.format == StateFormat::kBf16 ? 2
                                                                 : 0)),
        state1(bytes(numel, num_states >= 1 ? 4 : 0)),
        state2(bytes(numel, num_states >= 2 ? 4 : 0)),
        grad(bytes(numel, grad_nbytes(grad_type))) {
    for (std::int64_t i = 0; i < numel; ++i) {
      set_weight(storage.format, i, awkward(random));
      if (num_states >= 1) {
        state1.as<float>()[i] = awkward(random);
      }
      if (num_states >= 2) {  // Mostly as squares are; a negative one must still give the same NaN everywhere.
        const float x = awkward(random);
        state2.as<float>()[i] = random() % 8 == 0 ? x : x * x;
      }
    }
    fill_gradient(grad, grad_type, random);
  }

  static std::size_t bytes(std::int64_t numel, std::size_t element) {
    return static_cast<std::size_t>(numel) * element;
  }

  void set_weight(StateFormat format, std::int64_t i, float weight) {
    if (format == StateFormat::kFp32) {
      param.as<float>()[i] = weight;
    } else if (format == StateFormat::kFp16) {
      rest.as<float>()[i] = weight;
      param.as<std::uint16_t>()[i] = kernels::reference::to_fp16(weight);
    } else {
      const auto parts = kernels::reference::split(weight);
      param.as<std::uint16_t>()[i] = parts.hi;
      rest.as<std::int16_t>()[i] = parts.lo;
    }
  }

  float weight(StateFormat format, std::int64_t i) const {
    switch (format) {
      case StateFormat::kFp32:
        return param.as<float>()[i];
      case StateFormat::kFp16:
        return rest.as<float>()[i];
      case StateFormat::kBf16:
        return kernels::reference::join(param.as<std::uint16_t>()[i], rest.as<std::int16_t>()[i]);
    }
    return 0;
  }

  kernels::UpdateBuffers buffers() const {
    return {param.as<void>(),
            rest.nbytes() > 0 || num_elements == 0 ? rest.as<void>() : nullptr,
            num_states >= 1 ? state1.as<float>() : nullptr,
            num_states >= 2 ? state2.as<float>() : nullptr,
            grad.as<void>(),
            grad_type,
            num_elements};
  }

  bool is_same_as(const RunBuffers& other) const {
    return param == other.param && rest == other.rest && state1 == other.state1 && state2 == other.state2 &&
           grad == other.grad;
  }
  bool are_guards_intact() const {
    return param.is_guard_intact() && rest.is_guard_intact() && state1.is_guard_intact() && state2.is_guard_intact() &&
           grad.is_guard_intact();
  }

  GradType grad_type;
  std::int64_t num_elements;
  int num_states;
  FencedBuffer param, rest, state1, state2, grad;
};

}  // namespace pannier::testing
