#include "pannier/ckpt/verified_reads.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/strict_json.h"
#include "pannier/io/disk_file.h"

namespace pannier::ckpt {
namespace {

std::uint64_t round_down(std::uint64_t offset) { return offset / kIoAlignment * kIoAlignment; }
std::size_t round_up(std::size_t nbytes) { return (nbytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment; }

}  // namespace

VerifiedReads::VerifiedReads(CheckpointReader& reader, FileMover& mover, const std::vector<TensorRun>& runs)
    : reader_(reader), mover_(mover) {
  std::vector<bool> goes_on(runs.size());
  std::vector<bool> is_gone_on_with(runs.size());
  std::map<std::string, std::size_t> last;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto found = last.find(runs[i].tensor);
    if (found != last.end() && runs[found->second].end == runs[i].begin) {
      goes_on[i] = true;
      is_gone_on_with[found->second] = true;
    }
    last[runs[i].tensor] = i;
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    add_run(runs[i], goes_on[i], is_gone_on_with[i]);
  }
  send_ahead();
}

VerifiedReads::~VerifiedReads() {
  for (const UnderWay& one : under_way_) {
    one.transfer->wait_ended();
  }
}

const MovedFile& VerifiedReads::file_of(const std::string& name) {
  auto& file = files_[name];
  if (file == nullptr) {
    file = std::make_unique<MovedFile>(reader_.folder().open_file(name), reader_.path() + "/" + name);
    prefer_direct(file->fd.get());
  }
  return *file;
}

// Whole chunks are read, but for what the run before has read of the first, and the run after will read of the last.
void VerifiedReads::add_run(const TensorRun& run, bool goes_on, bool is_gone_on_with) {
  const TensorInfo* info = reader_.find(run.tensor);
  if (info == nullptr || run.begin < 0 || run.begin > run.end || run.end > *info->checked_numel()) {
    throw ConfigError(
        fmt::format("'{}' has no elements {} to {} of a tensor '{}'", reader_.path(), run.begin, run.end, run.tensor));
  }
  const std::size_t width = dtype_nbytes(info->dtype);
  const auto [stream, is_new] = stream_of_.try_emplace(run.tensor, streams_.size());
  if (is_new) {
    streams_.emplace_back();
  }
  for (const ManifestShard* shard : reader_.shards(run.tensor)) {
    const std::int64_t end = std::min(run.end, shard->end);
    for (std::int64_t at = std::max(run.begin, shard->begin); at < end;) {
      const std::int64_t chunk = at / kChunkElements;
      const std::int64_t first = std::max(shard->begin, chunk * kChunkElements);
      const std::int64_t last = chunk_end(first, shard->end);
      const std::int64_t stop = std::min(last, end);
      const Part part{.file = &file_of(shard->file), .shard = shard, .stream = stream->second, .chunk = chunk};
      add_chunk(part, goes_on && at == run.begin ? at : first, is_gone_on_with && stop == run.end ? stop : last, run,
                width);
      at = stop;
    }
  }
}

// Elements from `from` to `to` of a shard, in requests that fit a buffer.
void VerifiedReads::add_chunk(Part part, std::int64_t from, std::int64_t to, const TensorRun& run, std::size_t width) {
  const std::int64_t last = chunk_end(from, part.shard->end);
  const auto most = static_cast<std::int64_t>((mover_.buffer_nbytes() - 2 * kIoAlignment) / width);
  const auto nbytes_between = [width](std::int64_t begin, std::int64_t end) {
    return static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)) * width;
  };
  for (std::int64_t at = from; at < to; at += most) {
    const std::int64_t end = std::min(to, at + most);
    part.offset = reader_.file_offset(*part.shard, at);
    part.nbytes = nbytes_between(at, end);
    part.wanted_begin = std::min(nbytes_between(at, run.begin), part.nbytes);
    part.wanted_end = std::min(nbytes_between(at, run.end), part.nbytes);
    part.ends_chunk = end == last;
    parts_.push_back(part);
  }
}

void VerifiedReads::send_ahead() {
  while (num_sent_ < parts_.size() && under_way_.size() + 1 < mover_.num_buffers()) {
    const Part& part = parts_[num_sent_++];
    StagingBuffer buffer = mover_.acquire();
    const std::uint64_t begin = round_down(part.offset);
    const auto skipped = static_cast<std::size_t>(part.offset - begin);
    const auto memory = buffer.data().first(round_up(skipped + part.nbytes));
    IoTransferPtr transfer = mover_.read(*part.file, begin, memory, skipped + part.nbytes);
    under_way_.push_back({std::move(buffer), std::move(transfer), skipped});
  }
}

void VerifiedReads::check(const Part& part) {
  const ManifestShard& shard = *part.shard;
  const std::uint64_t expected = shard.checksums[static_cast<std::size_t>(part.chunk - shard.begin / kChunkElements)];
  if (const std::uint64_t found = streams_[part.stream].take(); found != expected) {
    const std::int64_t first = std::max(shard.begin, part.chunk * kChunkElements);
    bad_content(part.file->path, fmt::format("tensor '{}', elements {} to {}: checksum {:016x}, {:016x} was expected",
                                             shard.tensor, first, chunk_end(first, shard.end), found, expected));
  }
}

void VerifiedReads::take_next() {
  PANNIER_CHECK(num_taken_ < parts_.size(), "more was read of a checkpoint than was announced");
  buffer_.give_back();
  const Part& part = parts_[num_taken_++];
  UnderWay one = std::move(under_way_.front());
  under_way_.pop_front();
  one.transfer->wait_ended();
  send_ahead();
  one.transfer->wait_done();
  buffer_ = std::move(one.buffer);
  const std::span<const std::byte> bytes = buffer_.data().subspan(one.skipped, part.nbytes);
  streams_[part.stream].update(bytes);
  if (part.ends_chunk) {
    check(part);
  }
  left_ = bytes.subspan(part.wanted_begin, part.wanted_end - part.wanted_begin);
}

void VerifiedReads::read(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    while (left_.empty()) {
      take_next();
    }
    const std::size_t nbytes = std::min(left_.size(), bytes.size());
    std::memcpy(bytes.data(), left_.data(), nbytes);
    left_ = left_.subspan(nbytes);
    bytes = bytes.subspan(nbytes);
  }
  // What is read for a checksum alone comes to be checked too.
  while (left_.empty() && num_taken_ < parts_.size() &&
         parts_[num_taken_].wanted_begin == parts_[num_taken_].wanted_end) {
    take_next();
  }
}

}  // namespace pannier::ckpt
