#include "pannier/zero/bucket_names.h"

#include <fmt/format.h>

#include <cctype>
#include <cstdlib>
#include <set>

namespace pannier {

std::function<std::string(const std::string&)> bucket_names(const BucketLayout& layout,
                                                            const std::vector<std::string>& names) {
  std::vector<std::string> held;
  for (const Bucket& bucket : layout.buckets()) {
    // The last one comes first in the model's order.
    const std::string& first = names.at(static_cast<std::size_t>(bucket.segments.back().parameter));
    const std::size_t others = bucket.segments.size() - 1;
    held.push_back(others == 0 ? first : fmt::format("{} and {} more", first, others));
  }
  return [held](const std::string& message) {
    static constexpr std::string_view kWord = "bucket ";
    std::set<std::size_t> named;
    for (std::size_t at = message.find(kWord); at != std::string::npos; at = message.find(kWord, at + 1)) {
      const char* number = message.c_str() + at + kWord.size();
      if (std::isdigit(static_cast<unsigned char>(*number)) != 0) {
        named.insert(static_cast<std::size_t>(std::strtoull(number, nullptr, 10)));
      }
    }
    std::string text;
    for (const std::size_t bucket : named) {
      text += bucket < held.size() ? fmt::format("; bucket {} holds {}", bucket, held[bucket]) : "";
    }
    return text;
  };
}

std::string names_in(const ShardLayout& shards, int bucket, const ElementRange& range,
                     const std::function<std::string(int parameter)>& name_of) {
  std::vector<int> parameters;
  for (const ShardPiece& piece : shards.pieces(bucket)) {
    if (common({piece.shard_offset, piece.shard_offset + piece.numel}, range).numel() > 0) {
      parameters.push_back(piece.parameter);
    }
  }
  if (parameters.empty()) {
    return fmt::format("padding of bucket {}", bucket);
  }
  // The last one comes first in the model's order.
  const std::string first = name_of(parameters.back());
  return parameters.size() == 1 ? first : fmt::format("{} and {} more", first, parameters.size() - 1);
}

}  // namespace pannier
