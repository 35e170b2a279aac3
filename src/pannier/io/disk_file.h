// The scratch file of one rank: space of a fixed size on one or several disks, set aside before training starts. It has
// no name in its folder, so that nothing is left of it however the process ends. With several folders its bytes are
// striped over them, so that their rates add up. Direct I/O is used where a real write and read show that it works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pannier/io/process_files.h"

namespace pannier {

/// What offsets, lengths and memory of every transfer are multiples of.
inline constexpr std::size_t kIoAlignment = 4096;

/// Options of DiskFile.
struct DiskFileOptions {
  std::vector<std::string> folders = {};             ///< At least one; each gets one file.
  std::size_t nbytes = 0;                            ///< Rounded up to kIoAlignment.
  std::size_t stripe_nbytes = std::size_t{1} << 20;  ///< A multiple of kIoAlignment.
  int rank = 0;                                      ///< For names in messages.
  bool allow_direct = true;                          ///< False: through the page cache, whatever the disk can.
  bool allow_unnamed = true;                         ///< False: created with a name that is removed at once.
  /// Throws ConfigError when a field makes no sense.
  void validate() const;
};

/// Where a run of bytes lies: in one of the files, up to the end of the run or of the stripe.
struct FilePlace {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::size_t nbytes = 0;
};

/// Owns the files. Const functions are thread-safe. Move-only.
class DiskFile {
 public:
  /// Creates and preallocates the files, and proves them by writing and reading a block. Throws IoError naming folder,
  /// bytes wanted and bytes free when there is no room (ENOSPC); IoError naming the folder when it is missing, a file,
  /// or not writable; ConfigError for options that make no sense.
  explicit DiskFile(const DiskFileOptions& options);
  DiskFile(DiskFile&&) noexcept = default;
  DiskFile& operator=(DiskFile&&) noexcept = default;
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  ~DiskFile() = default;

  /// Gives the space back. No transfer may be under way.
  void close() noexcept { files_.clear(); }

  /// The place of `offset`, and how many of the `nbytes` from there lie together.
  [[nodiscard]] FilePlace place(std::uint64_t offset, std::size_t nbytes) const;
  /// The bytes that can be used: what was asked for, rounded up.
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] std::size_t num_files() const noexcept { return files_.size(); }
  /// The descriptor of a file; it stays ours.
  [[nodiscard]] int fd(std::size_t file) const { return files_.at(file).fd.get(); }
  /// How messages call a file: its folder and rank (it has no name on disk).
  [[nodiscard]] const std::string& name(std::size_t file) const { return files_.at(file).name; }
  /// A block of a file beyond its share, for trials: nothing rests there.
  [[nodiscard]] std::uint64_t trial_offset(std::size_t file) const { return files_.at(file).nbytes; }
  /// Whether every file bypasses the page cache.
  [[nodiscard]] bool is_direct() const noexcept;
  /// What a user should know: folder warnings, and why a file is not direct or not preallocated. Each names its folder.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  struct File {
    OwnedFd fd;
    std::string name;
    std::size_t nbytes = 0;  ///< Its share, without the block for trials.
    bool is_direct = false;
  };
  void open_one(const DiskFileOptions& options, std::size_t index, std::size_t share_nbytes);
  void choose_direct(File& file, const std::string& folder, bool is_in_memory);

  std::vector<File> files_;
  std::size_t nbytes_ = 0;
  std::size_t stripe_nbytes_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace pannier
