#include "pannier/io/faulty_disk.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "pannier/io/extent_table.h"

namespace pannier {

void FaultyDisk::add(const Fault& fault) {
  const std::lock_guard lock(rules_mutex_);
  rules_.push_back({fault, 0});
}

void FaultyDisk::clear() {
  const std::lock_guard lock(rules_mutex_);
  rules_.clear();
}

std::size_t FaultyDisk::num_hits() const {
  const std::lock_guard lock(rules_mutex_);
  return num_hits_;
}

std::vector<Fault> FaultyDisk::strike(const IoAttempt& attempt, bool is_before) {
  std::vector<Fault> faults;
  const std::lock_guard lock(rules_mutex_);
  for (auto& rule : rules_) {
    const Fault& fault = rule.fault;
    const bool matches =
        (attempt.is_write ? fault.on_write : fault.on_read) && (fault.kind != FaultKind::kFlipBit) == is_before;
    if (matches && ++rule.seen > fault.skip && rule.seen - fault.skip <= fault.times) {
      faults.push_back(fault);
      ++num_hits_;
    }
  }
  return faults;
}

std::optional<int> FaultyDisk::before(IoAttempt& attempt) {
  std::optional<int> answer;
  for (const Fault& fault : strike(attempt, true)) {
    if (fault.kind == FaultKind::kError) {
      answer = -fault.error_number;
    } else if (fault.kind == FaultKind::kShort) {
      // Direct I/O moves whole blocks only, so a part of the last one is moved, and not owned up to.
      attempt.nbytes = std::min(attempt.nbytes, padded_bytes(fault.nbytes));
      attempt.hook_word = fault.nbytes + 1;
    } else {
      std::this_thread::sleep_for(fault.delay);
    }
  }
  return answer;
}

int FaultyDisk::after(const IoAttempt& attempt, int result) {
  if (result > 0 && attempt.hook_word > 0) {
    result = std::min(result, static_cast<int>(attempt.hook_word - 1));
  }
  if (result <= 0 || attempt.is_write) {
    return result;
  }
  for (const Fault& fault : strike(attempt, false)) {
    if (const std::size_t at = fault.bit / 8; at < static_cast<std::size_t>(result)) {
      attempt.data[at] ^= static_cast<std::byte>(1U << (fault.bit % 8));
    }
  }
  return result;
}

}  // namespace pannier
