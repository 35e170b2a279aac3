// A model as others read it: a folder of safetensors in Hugging Face's layout. One file, or several with an index that
// says which tensor is in which. Written as the data comes, so that a model bigger than memory passes through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/safetensors_writer.h"

namespace pannier::ckpt {

/// How to cut a model into files.
struct ModelExportOptions {
  std::uint64_t max_shard_nbytes = 5'000'000'000;  ///< Of data in one file; a bigger tensor has a file of its own.
  std::string name = "model.safetensors";          ///< Of the file; several get a number before the suffix.
  void validate() const;                           ///< Throws ConfigError.
};

/// Writes one model. One thread; `folder` must outlive it. Files that are not complete are removed at the end.
class ModelExport {
 public:
  /// `tensors` in the order in which they will come. Throws ConfigError, IoError.
  ModelExport(const SealedFolder& folder, std::vector<TensorInfo> tensors, const ModelExportOptions& options = {});
  ~ModelExport();
  ModelExport(const ModelExport&) = delete;
  ModelExport& operator=(const ModelExport&) = delete;

  /// The next bytes, whole elements of one tensor.
  void write(std::span<const std::byte> bytes);
  /// Writes the index if there is one. Throws ConfigError naming a tensor that is incomplete.
  void finish();
  [[nodiscard]] const std::vector<std::string>& files() const noexcept { return files_; }

 private:
  void open_next();
  void skip_empty();

  const SealedFolder& folder_;
  std::vector<TensorInfo> tensors_;
  std::string index_name_;
  std::vector<std::size_t> first_of_;  ///< By file: its first tensor; then their number.
  std::vector<std::string> files_;
  std::unique_ptr<SafetensorsWriter> writer_;
  std::size_t file_ = 0;  ///< The next to be opened.
  std::size_t next_ = 0;  ///< The tensor that is being written.
  std::int64_t at_ = 0;
  std::uint64_t total_nbytes_ = 0;
};

/// "5GB", "100MB", "1GiB" or a number of bytes, as Hugging Face and we write sizes. Throws ConfigError.
[[nodiscard]] std::uint64_t parse_size(const std::string& text);

/// The type that "fp32", "bf16" or "fp16" names. Throws ConfigError.
[[nodiscard]] DType export_dtype(const std::string& name);

/// fp32 values as `type` (kF32, kBF16 or kF16), rounded as the engine rounds its own parameters.
void convert_values(std::span<const float> values, DType type, std::vector<std::byte>& bytes);
/// Values of a floating-point type as fp32. Throws ConfigError for another type.
void widen_values(std::span<const std::byte> bytes, DType type, std::vector<float>& values);

/// Makes a model of a checkpoint. Parameters become `type`; buffers keep theirs; tied tensors are there once. Returns
/// the files. Throws ConfigError, IoError.
std::vector<std::string> consolidate(CheckpointReader& reader, const std::string& folder, DType type,
                                     const ModelExportOptions& options = {});

}  // namespace pannier::ckpt
