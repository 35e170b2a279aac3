#include "pannier/ckpt/safetensors_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "pannier/base/error.h"

namespace pannier::ckpt {

SafetensorsWriter::SafetensorsWriter(const SealedFolder& folder, const std::string& name,
                                     const std::vector<TensorInfo>& tensors, const SafetensorsWriterOptions& options)
    : folder_(folder),
      name_(name),
      written_name_(options.rename_at_end ? name + ".partial" : name),
      header_(lay_out_safetensors(tensors, options.metadata)) {
  const std::string head = format_safetensors_header(header_, options.data_alignment);
  fd_ = folder_.create_file(written_name_);
  try {
    if (options.mover != nullptr) {
      packed_ = std::make_unique<PackedFile>(*options.mover, std::move(fd_), folder_.path() + "/" + written_name_,
                                             head.size() + data_nbytes());
    }
    append(std::as_bytes(std::span(head)));
  } catch (const IoError&) {
    packed_.reset();
    folder_.remove(written_name_);
    throw;
  }
  data_offset_ = head.size();
}

std::uint64_t SafetensorsWriter::data_nbytes() const noexcept {
  return header_.entries.empty() ? 0 : header_.entries.back().end;
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  if (packed_ != nullptr) {
    packed_->append(bytes);
  } else {
    write_exactly(fd_.get(), bytes, data_offset_ + at_, folder_.path() + "/" + written_name_);
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  packed_.reset();
  if (!is_finished_) {
    try {
      folder_.remove(written_name_);
    } catch (const std::exception&) {
      // A leftover that no manifest names; the next save's clean-up removes it.
    }
  }
}

void SafetensorsWriter::write(std::size_t index, std::int64_t begin_element, std::span<const std::byte> bytes) {
  if (index >= header_.entries.size()) {
    throw ConfigError(fmt::format("'{}' has {} tensors, number {} was written", name_, header_.entries.size(), index));
  }
  const auto& entry = header_.entries[index];
  const std::size_t element = dtype_nbytes(entry.info.dtype);
  const std::uint64_t wanted_at =
      entry.begin + static_cast<std::uint64_t>(std::max<std::int64_t>(begin_element, 0)) * element;
  if (begin_element < 0 || begin_element > entry.numel || wanted_at != at_ || bytes.size() % element != 0 ||
      bytes.size() > entry.end - at_) {
    throw ConfigError(fmt::format("'{}': {} bytes of tensor '{}' from element {} do not follow the {} bytes before",
                                  name_, bytes.size(), entry.info.name, begin_element, at_));
  }
  append(bytes);
  at_ += bytes.size();
}

void SafetensorsWriter::finish() {
  for (const auto& entry : header_.entries) {
    if (entry.end > at_) {
      throw ConfigError(fmt::format("'{}': tensor '{}' is incomplete, {} of {} bytes were written", name_,
                                    entry.info.name, at_ - std::min(at_, entry.begin), entry.end - entry.begin));
    }
  }
  if (packed_ != nullptr) {
    packed_->finish();
    packed_.reset();
  } else {
    sync_to_disk(fd_.get(), folder_.path() + "/" + written_name_);
  }
  if (written_name_ != name_) {
    folder_.rename(written_name_, name_);
  }
  is_finished_ = true;
  fd_.reset();
}

std::uint64_t SafetensorsWriter::file_nbytes() const noexcept { return data_offset_ + data_nbytes(); }

}  // namespace pannier::ckpt
