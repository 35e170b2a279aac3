#include "pannier/hardware/core_use.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "pannier/hardware/kernel_text.h"

namespace pannier {
namespace {

// A line such as "cpu3 user nice system idle iowait irq softirq steal guest ...". Guests' ticks are in user's; stolen
// ones were nobody's here.
constexpr std::size_t kIdle = 3;
constexpr std::size_t kIowait = 4;
constexpr std::size_t kNumTicks = 7;

double own_seconds() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

}  // namespace

CoreUse::CoreUse(std::filesystem::path root) : root_(std::move(root)), own_begin_s_(own_seconds()) {
  const std::map<int, Ticks> all = read();
  for (const int core : allowed_cores(root_)) {
    if (const auto it = all.find(core); it != all.end()) {
      begin_.insert(*it);
    }
  }
}

std::map<int, CoreUse::Ticks> CoreUse::read() const {
  const std::string text = read_kernel_text(root_ / "proc/stat").value_or("");
  std::map<int, Ticks> cores;
  for (const auto line : split_at(text, '\n')) {
    const auto words = split_words(line);
    if (words.size() <= kNumTicks || !words[0].starts_with("cpu")) {
      continue;
    }
    const auto number = parse_count(words[0].substr(3));
    if (!number) {  // All cores together.
      continue;
    }
    Ticks& ticks = cores[static_cast<int>(*number)];
    for (std::size_t i = 0; i < kNumTicks; ++i) {
      const std::size_t count = parse_count(words[i + 1]).value_or(0);
      ticks.all += count;
      ticks.busy += i == kIdle || i == kIowait ? 0 : count;
    }
  }
  return cores;
}

double CoreUse::cores_left() const {
  const std::map<int, Ticks> now = read();
  double busy = 0;
  double all = 0;
  for (const auto& [core, begin] : begin_) {
    if (const auto it = now.find(core); it != now.end() && it->second.all > begin.all) {
      all += static_cast<double>(it->second.all - begin.all);
      busy += static_cast<double>(it->second.busy - std::min(begin.busy, it->second.busy));
    }
  }
  const double cores = static_cast<double>(num_cores());
  if (all == 0) {
    return cores;
  }
  const double own = (own_seconds() - own_begin_s_) * static_cast<double>(::sysconf(_SC_CLK_TCK));
  return cores * (1.0 - std::clamp((busy - own) / all, 0.0, 1.0));
}

}  // namespace pannier
