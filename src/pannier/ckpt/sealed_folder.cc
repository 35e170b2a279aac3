#include "pannier/ckpt/sealed_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "pannier/base/error.h"

namespace pannier::ckpt {
namespace {

constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 30;  // The kernel stops short of 2 GiB without an error.

// A description of its own, since locks belong to descriptions.
OwnedFd open_again(int fd, const std::string& path) {
  OwnedFd again(::openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!again.is_open()) {
    throw IoError(fmt::format("open '{}'", path), errno);
  }
  return again;
}

}  // namespace

bool is_plain_name(std::string_view name) noexcept {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           kPlainSigns.find(c) != std::string_view::npos;
  };
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(), plain);
}

void read_exactly(int fd, std::span<std::byte> bytes, std::uint64_t offset, const std::string& file) {
  while (!bytes.empty()) {
    const auto got = ::pread(fd, bytes.data(), std::min(bytes.size(), kMaxRequestBytes), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      throw IoError(fmt::format("read '{}': {} bytes at offset {}{}", file, bytes.size(), offset,
                                got == 0 ? ", where the file ends" : ""),
                    got < 0 ? errno : EIO);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void write_exactly(int fd, std::span<const std::byte> bytes, std::uint64_t offset, const std::string& file) {
  while (!bytes.empty()) {
    const auto put = ::pwrite(fd, bytes.data(), std::min(bytes.size(), kMaxRequestBytes), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put <= 0) {
      throw IoError(fmt::format("write '{}': {} bytes at offset {}", file, bytes.size(), offset),
                    put < 0 ? errno : ENOSPC);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(put));
    offset += static_cast<std::uint64_t>(put);
  }
}

std::uint64_t regular_file_nbytes(int fd, const std::string& file) {
  struct stat facts{};
  if (::fstat(fd, &facts) != 0) {
    throw IoError(fmt::format("'{}'", file), errno);
  }
  if (!S_ISREG(facts.st_mode)) {
    throw IoError(fmt::format("'{}' is not a regular file", file), EINVAL);
  }
  return static_cast<std::uint64_t>(facts.st_size);
}

void sync_to_disk(int fd, const std::string& file) {
  if (::fsync(fd) != 0) {
    throw IoError(fmt::format("sync '{}'", file), errno);
  }
}

SealedFolder::SealedFolder(const std::string& path)
    : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), path_(path) {
  if (!fd_.is_open()) {
    throw IoError(fmt::format("folder '{}'", path), errno);
  }
}

std::string SealedFolder::path_of(const std::string& name) const {
  if (!is_plain_name(name)) {
    throw ConfigError(
        fmt::format("'{}' is no name for a file in '{}': letters, digits and {} only", name, path_, kPlainSigns));
  }
  return path_ + "/" + name;
}

SealedFolder SealedFolder::folder(const std::string& name) const {
  std::string path = path_of(name);
  OwnedFd fd(::openat(fd_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.is_open()) {
    throw IoError(fmt::format("folder '{}'", path), errno);
  }
  return {std::move(fd), std::move(path)};
}

OwnedFd SealedFolder::open_file(const std::string& name) const {
  const std::string path = path_of(name);
  OwnedFd fd(::openat(fd_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd.is_open()) {
    throw IoError(fmt::format("open '{}'{}", path, errno == ELOOP ? ", which is a link," : ""), errno);
  }
  static_cast<void>(regular_file_nbytes(fd.get(), path));
  return fd;
}

OwnedFd SealedFolder::create_file(const std::string& name) const {
  const std::string path = path_of(name);
  remove(name);
  OwnedFd fd(::openat(fd_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd.is_open()) {
    throw IoError(fmt::format("create '{}'", path), errno);
  }
  return fd;
}

std::string SealedFolder::read_text(const std::string& name, std::uint64_t max_nbytes) const {
  const OwnedFd fd = open_file(name);
  const std::string path = path_of(name);
  const std::uint64_t nbytes = regular_file_nbytes(fd.get(), path);
  if (nbytes > max_nbytes) {
    throw IoError(fmt::format("'{}' has {} bytes, at most {} were expected", path, nbytes, max_nbytes), EFBIG);
  }
  std::string text(nbytes, '\0');
  read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0, path);
  return text;
}

void SealedFolder::write_text(const std::string& name, std::string_view text) const {
  const std::string other = name + ".partial";
  {
    const OwnedFd fd = create_file(other);
    write_exactly(fd.get(), std::as_bytes(std::span(text)), 0, path_of(other));
    sync_to_disk(fd.get(), path_of(other));
  }
  rename(other, name);
}

void SealedFolder::rename(const std::string& from, const std::string& to) const {
  const std::string path = path_of(to);
  if (::renameat(fd_.get(), from.c_str(), fd_.get(), to.c_str()) != 0) {
    throw IoError(fmt::format("rename '{}' to '{}'", path_of(from), path), errno);
  }
  sync();
}

void SealedFolder::remove(const std::string& name) const {
  const std::string path = path_of(name);
  int failed = ::unlinkat(fd_.get(), name.c_str(), 0);
  if (failed != 0 && errno == EISDIR) {
    failed = ::unlinkat(fd_.get(), name.c_str(), AT_REMOVEDIR);
  }
  if (failed != 0 && errno != ENOENT) {
    throw IoError(fmt::format("remove '{}'", path), errno);
  }
}

void SealedFolder::sync() const { sync_to_disk(fd_.get(), path_); }

std::vector<std::string> SealedFolder::names() const {
  // A new description, since the stream would move the position of ours and close it.
  const int again = ::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(again < 0 ? nullptr : ::fdopendir(again), &::closedir);
  if (stream == nullptr) {
    throw IoError(fmt::format("list '{}'", path_), errno);
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(stream.get())) {
    if (is_plain_name(entry->d_name)) {
      names.emplace_back(entry->d_name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

SealedFolderLock::SealedFolderLock(const SealedFolder& folder) : fd_(open_again(folder.fd_.get(), folder.path_)) {
  while (::flock(fd_.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
}

std::optional<SealedFolderLock> SealedFolderLock::unless_taken(const SealedFolder& folder) {
  SealedFolderLock lock(open_again(folder.fd_.get(), folder.path_));
  if (::flock(lock.fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return std::nullopt;
  }
  return lock;
}

}  // namespace pannier::ckpt
