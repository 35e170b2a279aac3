// Reads a checkpoint's tensors in an order that is known in advance: requests are with the disk long before somebody
// wants what they bring, every byte is read once, past the page cache, and checked against its chunk's checksum. Where
// a run begins or ends within a chunk, the rest of the chunk is read for the checksum alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/file_mover.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {

/// Elements of a tensor of the checkpoint.
struct TensorRun {
  std::string tensor;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Gives out the bytes of runs. One thread.
class VerifiedReads {
 public:
  /// `reader` and `mover` must outlive it. Runs of one tensor ascend. Throws IoError where a file is not what the
  /// manifest says, ConfigError for elements that are not there.
  VerifiedReads(CheckpointReader& reader, FileMover& mover, const std::vector<TensorRun>& runs);
  /// Waits for what is under way.
  ~VerifiedReads();
  VerifiedReads(const VerifiedReads&) = delete;
  VerifiedReads& operator=(const VerifiedReads&) = delete;

  /// The bytes that follow in the runs. Throws IoError naming file, tensor and elements where the disk fails or a
  /// checksum is wrong, which may come to light after some of the chunk's bytes were given out.
  void read(std::span<std::byte> bytes);

 private:
  /// A part of a chunk of a shard that one request brings.
  struct Part {
    const MovedFile* file = nullptr;
    const ManifestShard* shard = nullptr;
    std::size_t stream = 0;    ///< Whose checksum it goes into.
    std::uint64_t offset = 0;  ///< In the file.
    std::size_t nbytes = 0;
    std::size_t wanted_begin = 0;  ///< Bytes of it that somebody wants.
    std::size_t wanted_end = 0;
    std::int64_t chunk = 0;
    bool ends_chunk = false;
  };
  struct UnderWay {
    StagingBuffer buffer;
    IoTransferPtr transfer;
    std::size_t skipped = 0;  ///< Bytes of the buffer before the part.
  };

  void add_run(const TensorRun& run, bool goes_on, bool is_gone_on_with);
  void add_chunk(Part part, std::int64_t from, std::int64_t to, const TensorRun& run, std::size_t width);
  [[nodiscard]] const MovedFile& file_of(const std::string& name);
  void send_ahead();
  void take_next();
  void check(const Part& part);

  CheckpointReader& reader_;
  FileMover& mover_;
  std::map<std::string, std::unique_ptr<MovedFile>> files_;
  std::map<std::string, std::size_t> stream_of_;
  std::vector<ChecksumStream> streams_;
  std::vector<Part> parts_;
  std::size_t num_sent_ = 0;
  std::size_t num_taken_ = 0;
  std::deque<UnderWay> under_way_;
  StagingBuffer buffer_;             ///< Of the part that is given out.
  std::span<const std::byte> left_;  ///< Of its wanted bytes.
};

}  // namespace pannier::ckpt
