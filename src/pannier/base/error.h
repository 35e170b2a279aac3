// Errors and checks. Everything that goes wrong in Pannier is one of four exceptions, so that a caller can tell what
// the user wrote (ConfigError), what the machine refused (IoError, OutOfMemoryError) and what is our bug
// (InternalError).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace pannier {

/// The user asked for something that cannot be: a wrong key, value, parameter or order of calls. A ValueError in
/// Python.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The machine refused an operation on a file or device. An OSError in Python.
class IoError : public std::runtime_error {
 public:
  /// `what_failed` names operation and path; `error_number` is an errno value, whose text is appended.
  IoError(const std::string& what_failed, int error_number);
  [[nodiscard]] int error_number() const noexcept { return error_number_; }

 private:
  int error_number_;
};

/// Device or host memory does not suffice. A RuntimeError in Python whose message contains " out of memory. ".
class OutOfMemoryError : public std::runtime_error {
 public:
  /// `where` is "CPU", "CUDA" or "host"; `owner` names what the memory was for; both sizes are in bytes.
  OutOfMemoryError(const std::string& where, const std::string& owner, std::size_t wanted_bytes,
                   std::size_t free_bytes);
  using std::runtime_error::runtime_error;
};

/// A promise that Pannier makes to itself was broken. Always a bug of ours.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {
[[noreturn]] void check_failed(const char* expression, const char* file, int line, const std::string& message);
}  // namespace detail

}  // namespace pannier

/// Throws InternalError with `message` (a std::string expression) unless `condition` holds. On in every build.
#define PANNIER_CHECK(condition, message)                                         \
  do {                                                                            \
    if (!(condition)) {                                                           \
      ::pannier::detail::check_failed(#condition, __FILE__, __LINE__, (message)); \
    }                                                                             \
  } while (false)
