#include "pannier/ckpt/model_export.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "pannier/base/error.h"

namespace pannier::ckpt {
namespace {

constexpr std::string_view kSuffix = ".safetensors";

std::uint64_t nbytes_of_tensor(const TensorInfo& info) {
  const auto numel = info.checked_numel();
  if (!numel) {
    throw ConfigError(fmt::format("tensor '{}' has a shape that can't be", info.name));
  }
  return static_cast<std::uint64_t>(*numel) * dtype_nbytes(info.dtype);
}

}  // namespace

void ModelExportOptions::validate() const {
  if (max_shard_nbytes == 0) {
    throw ConfigError("the greatest size of a file must be positive");
  }
  if (!is_plain_name(name) || !name.ends_with(kSuffix) || name.size() == kSuffix.size()) {
    throw ConfigError(fmt::format("'{}' is no name for a file of a model: NAME.safetensors was expected", name));
  }
}

ModelExport::ModelExport(const SealedFolder& folder, std::vector<TensorInfo> tensors, const ModelExportOptions& options)
    : folder_(folder), tensors_(std::move(tensors)), index_name_(options.name + ".index.json") {
  options.validate();
  std::uint64_t filled = 0;
  first_of_.push_back(0);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::uint64_t nbytes = nbytes_of_tensor(tensors_[i]);
    if (filled > 0 && filled + nbytes > options.max_shard_nbytes) {
      first_of_.push_back(i);
      filled = 0;
    }
    filled += nbytes;
    total_nbytes_ += nbytes;
  }
  const std::size_t count = first_of_.size();
  first_of_.push_back(tensors_.size());
  const std::string stem = options.name.substr(0, options.name.size() - kSuffix.size());
  for (std::size_t i = 1; i <= count; ++i) {
    files_.push_back(count == 1 ? options.name : fmt::format("{}-{:05}-of-{:05}{}", stem, i, count, kSuffix));
  }
  folder_.remove(index_name_);  // An older one would name files that are none of this model's.
  if (count > 1) {
    folder_.remove(options.name);
  }
  open_next();
  skip_empty();
}

ModelExport::~ModelExport() = default;

void ModelExport::open_next() {
  if (writer_ != nullptr) {
    writer_->finish();
    writer_.reset();
  }
  const std::vector<TensorInfo> own(tensors_.begin() + static_cast<std::ptrdiff_t>(first_of_[file_]),
                                    tensors_.begin() + static_cast<std::ptrdiff_t>(first_of_[file_ + 1]));
  writer_ = std::make_unique<SafetensorsWriter>(folder_, files_[file_], own,
                                                SafetensorsWriterOptions{.metadata = {{"format", "pt"}}});
  ++file_;
}

// Goes on to a tensor that has elements, and to its file.
void ModelExport::skip_empty() {
  while (next_ < tensors_.size() && at_ == *tensors_[next_].checked_numel()) {
    ++next_;
    at_ = 0;
    if (next_ < tensors_.size() && next_ == first_of_[file_]) {
      open_next();
    }
  }
}

void ModelExport::write(std::span<const std::byte> bytes) {
  PANNIER_CHECK(next_ < tensors_.size(), "bytes after the last tensor");
  writer_->write(next_ - first_of_[file_ - 1], at_, bytes);
  at_ += static_cast<std::int64_t>(bytes.size() / dtype_nbytes(tensors_[next_].dtype));
  skip_empty();
}

void ModelExport::finish() {
  if (next_ < tensors_.size()) {
    throw ConfigError(fmt::format("tensor '{}' is incomplete", tensors_[next_].name));
  }
  writer_->finish();
  if (files_.size() > 1) {
    nlohmann::json index = {{"metadata", {{"total_size", total_nbytes_}}}, {"weight_map", nlohmann::json::object()}};
    for (std::size_t file = 0; file < files_.size(); ++file) {
      for (std::size_t i = first_of_[file]; i < first_of_[file + 1]; ++i) {
        index["weight_map"][tensors_[i].name] = files_[file];
      }
    }
    folder_.write_text(index_name_, index.dump(2) + "\n");
  }
}

DType export_dtype(const std::string& name) {
  if (name == "fp32" || name == "bf16" || name == "fp16") {
    return name == "fp32" ? DType::kF32 : name == "bf16" ? DType::kBF16 : DType::kF16;
  }
  throw ConfigError(fmt::format("'{}' is no type of a model's parameters; write fp32, bf16 or fp16", name));
}

std::uint64_t parse_size(const std::string& text) {
  static constexpr std::array<std::pair<std::string_view, std::uint64_t>, 9> kUnits{{{"", 1},
                                                                                     {"B", 1},
                                                                                     {"KB", 1'000},
                                                                                     {"MB", 1'000'000},
                                                                                     {"GB", 1'000'000'000},
                                                                                     {"TB", 1'000'000'000'000},
                                                                                     {"KIB", std::uint64_t{1} << 10},
                                                                                     {"MIB", std::uint64_t{1} << 20},
                                                                                     {"GIB", std::uint64_t{1} << 30}}};
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  const auto* const found =
      std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& each) { return each.first == unit; });
  if (error != std::errc() || found == kUnits.end() || number == 0 ||
      number > (std::uint64_t{1} << 62) / found->second) {
    throw ConfigError(fmt::format("'{}' is no size; write 5GB, 500MB, 2GiB or a number of bytes", text));
  }
  return number * found->second;
}

}  // namespace pannier::ckpt
