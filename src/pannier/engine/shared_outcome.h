// Something that every rank does by itself, and that counts as done only where all have done it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pannier/comm/communicator.h"

namespace pannier {

/// Runs `body` and tells the other ranks how it ended, through the store. Returns what each rank's body returned, by
/// rank. Where one failed, throws on every rank: its own error on that rank, on the others one of the same kind that
/// names the rank. Throws CollectiveError where a rank does not come. `name` says what all of them do.
[[nodiscard]] std::vector<std::string> done_by_all(Communicator& ranks, const std::string& name,
                                                   const std::function<std::string()>& body);
/// The same of a thread with a channel of its own.
[[nodiscard]] std::vector<std::string> done_by_all(TextChannel& ranks, const std::string& name,
                                                   const std::function<std::string()>& body);

}  // namespace pannier
