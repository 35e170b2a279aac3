#include "pannier/comm/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"

namespace pannier {
namespace {

constexpr const char* kSame = "=";  ///< Said instead of a text that is rank 0's.

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::string excerpt(const std::string& line, std::size_t column) {
  constexpr std::size_t kBefore = 60;
  constexpr std::size_t kLength = 160;
  const std::size_t begin = column > kBefore ? column - kBefore : 0;
  return fmt::format("'{}{}{}'", begin > 0 ? "..." : "", line.substr(begin, kLength),
                     begin + kLength < line.size() ? "..." : "");
}

// FNV-1a: the same for every build of every rank.
std::string fingerprint(const std::string& text) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return fmt::format("{:016x} {}", hash, text.size());
}

std::string seconds_text(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", std::chrono::duration<double>(time).count());
}

std::string who_is_missing(const std::string& operation, const std::vector<int>& missing,
                           std::chrono::milliseconds timeout) {
  return fmt::format("{}: {} {} {} not come after {}", operation, missing.size() == 1 ? "rank" : "ranks",
                     fmt::join(missing, ", "), missing.size() == 1 ? "has" : "have", seconds_text(timeout));
}

}  // namespace

std::string first_difference(const std::string& text, const std::string& other, const std::string& whose,
                             const std::string& whose_other) {
  const std::vector<std::string> left = lines_of(text);
  const std::vector<std::string> right = lines_of(other);
  const std::size_t shorter = std::min(left.size(), right.size());
  for (std::size_t i = 0; i < shorter; ++i) {
    if (left[i] != right[i]) {
      const auto column = static_cast<std::size_t>(
          std::mismatch(left[i].begin(), left[i].end(), right[i].begin(), right[i].end()).first - left[i].begin());
      const std::string where = left.size() > 1 || right.size() > 1 ? fmt::format("line {}: ", i + 1) : "";
      return fmt::format("{}{} on {}, {} on {}", where, excerpt(left[i], column), whose, excerpt(right[i], column),
                         whose_other);
    }
  }
  if (left.size() != right.size()) {
    const bool left_is_longer = left.size() > right.size();
    return fmt::format("line {}: {} on {}, nothing on {}", shorter + 1,
                       excerpt((left_is_longer ? left : right)[shorter], 0), left_is_longer ? whose : whose_other,
                       left_is_longer ? whose_other : whose);
  }
  return text == other ? "" : fmt::format("the last line ends differently on {} and {}", whose, whose_other);
}

Agreement::Agreement(std::unique_ptr<KeyValueStore> store, std::shared_ptr<GroupState> state, int rank, int world_size,
                     std::chrono::milliseconds timeout, std::string prefix)
    : store_(std::move(store)),
      state_(std::move(state)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      prefix_(std::move(prefix)) {}

bool Agreement::await(const std::string& key, std::string& value, GroupState::Clock::time_point deadline,
                      const std::string& operation) {
  auto pause = std::chrono::milliseconds(1);
  while (true) {
    if (auto found = store_->get(key)) {
      value = std::move(*found);
      return true;
    }
    if (GroupState::Clock::now() >= deadline) {
      return false;
    }
    const auto until = std::min(deadline, GroupState::Clock::now() + pause);
    if (state_->wait(until, [] { return false; }) == GroupState::Outcome::kFailed) {
      state_->throw_if_failed(operation);
    }
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

// 1. Rank 0 says its fingerprint. 2. The others say "=", or their text where it differs. 3. Rank 0 says the verdict:
// "=", or "!" and the difference, or "?" and who has not come.
void Agreement::agree(const std::string& name, const std::string& value) {
  const std::string prefix = fmt::format("{}agree/{}/", prefix_, num_agreements_++);
  const std::string operation = fmt::format("comparing {} over ranks", name);
  const auto deadline = GroupState::Clock::now() + timeout_;
  std::string verdict;
  if (rank_ == 0) {
    store_->set(prefix + "fingerprint", fmt::format("{}\n{}", name, fingerprint(value)));
    verdict = judge(prefix, name, value);
    store_->set(prefix + "verdict", verdict);
  } else {
    const std::string missing = fmt::format("{}: rank 0 has not come after {}", operation, seconds_text(timeout_));
    std::string expected;
    if (!await(prefix + "fingerprint", expected, deadline, operation)) {
      throw CollectiveError(missing);
    }
    const std::string own_name = expected.substr(0, expected.find('\n'));
    if (own_name != name) {
      store_->set(fmt::format("{}{}", prefix, rank_), fmt::format("{}\n{}", name, value));
    } else {
      const bool same = expected == fmt::format("{}\n{}", name, fingerprint(value));
      store_->set(fmt::format("{}{}", prefix, rank_), same ? kSame : fmt::format("{}\n{}", name, value));
    }
    // Rank 0 may be waiting for others up to its own deadline, which began later than ours.
    if (!await(prefix + "verdict", verdict, deadline + timeout_, operation)) {
      throw CollectiveError(missing);
    }
  }
  if (verdict != kSame) {
    let_all_read(prefix);
  }
  if (verdict.front() == '!') {
    throw ConfigError(verdict.substr(1));
  }
  if (verdict.front() == '?') {
    throw CollectiveError(verdict.substr(1));
  }
}

std::vector<std::string> Agreement::share_texts(const std::string& name, const std::string& text) {
  const std::string prefix = fmt::format("{}texts/{}/", prefix_, num_agreements_++);
  const std::string operation = fmt::format("sharing {} over ranks", name);
  store_->set(fmt::format("{}{}", prefix, rank_), fmt::format("{}\n{}", name, text));
  const auto deadline = GroupState::Clock::now() + timeout_;
  std::vector<std::string> texts(static_cast<std::size_t>(world_size_));
  std::vector<int> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    std::string said;
    if (!await(fmt::format("{}{}", prefix, rank), said, deadline, operation)) {
      missing.push_back(rank);
      continue;
    }
    const std::string theirs = said.substr(0, said.find('\n'));
    if (theirs != name) {
      throw CollectiveError(fmt::format("rank {} shares {} where rank {} shares {}", rank, theirs, rank_, name));
    }
    texts[static_cast<std::size_t>(rank)] = said.substr(name.size() + 1);
  }
  if (!missing.empty()) {
    throw CollectiveError(who_is_missing(operation, missing, timeout_));
  }
  let_all_read(prefix);
  return texts;
}

// Rank 0 may be about to fail of what was said, and the store may end with it: it waits a little for those who read.
void Agreement::let_all_read(const std::string& prefix) {
  constexpr std::chrono::milliseconds kPatience{5000};
  const std::string key = prefix + "read";
  if (rank_ != 0) {
    store_->add(key, 1);
    return;
  }
  const auto deadline = GroupState::Clock::now() + std::min(timeout_, kPatience);
  auto pause = std::chrono::milliseconds(1);
  while (store_->add(key, 0) < world_size_ - 1 && GroupState::Clock::now() < deadline) {
    const auto until = std::min(deadline, GroupState::Clock::now() + pause);
    if (state_->wait(until, [] { return false; }) == GroupState::Outcome::kFailed) {
      return;
    }
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

std::string Agreement::judge(const std::string& prefix, const std::string& name, const std::string& value) {
  const auto deadline = GroupState::Clock::now() + timeout_;
  std::vector<int> missing;
  for (int rank = 1; rank < world_size_; ++rank) {
    std::string said;
    if (!await(fmt::format("{}{}", prefix, rank), said, deadline, fmt::format("comparing {} over ranks", name))) {
      missing.push_back(rank);
    } else if (said != kSame) {
      const std::string theirs = said.substr(0, said.find('\n'));
      if (theirs != name) {
        return fmt::format("!rank {} compares {} where rank 0 compares {}", rank, theirs, name);
      }
      return fmt::format("!rank {} differs from rank 0 in {}: {}", rank, name,
                         first_difference(value, said.substr(name.size() + 1), "rank 0", fmt::format("rank {}", rank)));
    }
  }
  if (!missing.empty()) {
    return "?" + who_is_missing(fmt::format("comparing {} over ranks", name), missing, timeout_);
  }
  return kSame;
}

}  // namespace pannier
