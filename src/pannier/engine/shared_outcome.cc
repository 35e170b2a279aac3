#include "pannier/engine/shared_outcome.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <exception>
#include <optional>
#include <string_view>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"

namespace pannier {
namespace {

constexpr std::string_view kDone = "done\n";
constexpr std::string_view kConfig = "config\n";
constexpr std::string_view kOther = "other\n";
constexpr std::string_view kIo = "io ";  // Then the error's number, and the message in the next line.

std::string io_text(const IoError& error) {
  std::string message = error.what();
  const std::string suffix = std::string(": ") + std::strerror(error.error_number());
  if (message.ends_with(suffix)) {
    message.resize(message.size() - suffix.size());  // The error made of it appends it again.
  }
  return fmt::format("{}{}\n{}", kIo, error.error_number(), message);
}

void throw_if_failed(const std::string& text, std::size_t rank) {
  const auto after = [&](std::string_view head) { return fmt::format("rank {}: {}", rank, text.substr(head.size())); };
  if (text.starts_with(kConfig)) {
    throw ConfigError(after(kConfig));
  }
  if (text.starts_with(kIo)) {
    int number = 0;
    std::from_chars(text.data() + kIo.size(), text.data() + text.size(), number);
    throw IoError(fmt::format("rank {}: {}", rank, text.substr(text.find('\n') + 1)), number);
  }
  if (!text.starts_with(kDone)) {
    throw CollectiveError(after(kOther));
  }
}

template <class Ranks>
std::vector<std::string> done_by_all_of(Ranks& ranks, const std::string& name,
                                        const std::function<std::string()>& body) {
  std::string text;
  std::exception_ptr own;
  try {
    text = std::string(kDone) + body();
  } catch (const CollectiveError&) {
    throw;  // There is nobody to tell.
  } catch (const ConfigError& error) {
    own = std::current_exception();
    text = std::string(kConfig) + error.what();
  } catch (const IoError& error) {
    own = std::current_exception();
    text = io_text(error);
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = std::string(kOther) + error.what();
  }
  std::vector<std::string> texts;
  try {
    texts = ranks.share_texts(name, text);
  } catch (const CollectiveError&) {
    if (own) {
      std::rethrow_exception(own);  // What happened here says more.
    }
    throw;
  }
  if (own) {
    std::rethrow_exception(own);
  }
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    throw_if_failed(texts[rank], rank);
    texts[rank].erase(0, kDone.size());
  }
  return texts;
}

}  // namespace

std::vector<std::string> done_by_all(Communicator& ranks, const std::string& name,
                                     const std::function<std::string()>& body) {
  return done_by_all_of(ranks, name, body);
}

std::vector<std::string> done_by_all(TextChannel& ranks, const std::string& name,
                                     const std::function<std::string()>& body) {
  return done_by_all_of(ranks, name, body);
}

}  // namespace pannier
