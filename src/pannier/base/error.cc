#include "pannier/base/error.h"

#include <fmt/format.h>

#include <system_error>

#include "pannier/base/units.h"

namespace pannier {

IoError::IoError(const std::string& what_failed, int error_number)
    : std::runtime_error(fmt::format("{}: {}", what_failed, std::generic_category().message(error_number))),
      error_number_(error_number) {}

OutOfMemoryError::OutOfMemoryError(const std::string& where, const std::string& owner, std::size_t wanted_bytes,
                                   std::size_t free_bytes)
    : std::runtime_error(fmt::format("{} out of memory. Tried to allocate {} for {}, {} free.", where,
                                     format_bytes(wanted_bytes), owner, format_bytes(free_bytes))) {}

namespace detail {
void check_failed(const char* expression, const char* file, int line, const std::string& message) {
  throw InternalError(fmt::format("{} ({} failed at {}:{})", message, expression, file, line));
}
}  // namespace detail

}  // namespace pannier
