#include "pannier/comm/mailbox.h"

namespace pannier {

void Mailbox::post(std::uint32_t sequence, int source, Letter letter) {
  state_->change([&] { letters_.emplace(std::pair(sequence, source), std::move(letter)); });
}

bool Mailbox::has(std::uint32_t sequence, int source) const { return letters_.contains({sequence, source}); }

Letter Mailbox::take(std::uint32_t sequence, int source) {
  Letter letter;
  state_->change([&] { letter = std::move(letters_.extract({sequence, source}).mapped()); });
  return letter;
}

}  // namespace pannier
