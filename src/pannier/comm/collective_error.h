// The error of a group of ranks.
#pragma once

#include <stdexcept>

namespace pannier {

/// A collective operation did not come to its end: a rank is missing, has died, failed or runs something else. The
/// message names the operation and the rank. The group is dead from then on. A RuntimeError in Python.
class CollectiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace pannier
