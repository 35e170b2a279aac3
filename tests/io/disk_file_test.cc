#include "pannier/io/disk_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <string>

#include "pannier/base/error.h"
#include "pannier/io/folder.h"
#include "pannier/io/folder_lock.h"
#include "pannier/io/process_files.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

template <class Action>
std::string io_error_of(const Action& action, int error_number) {
  try {
    action();
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), error_number) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Runs `body` in a child with a memory file system of `size` at `path` that nobody else sees. A machine where this is
// not allowed answers 77, and the test then stands on the limit on file sizes alone.
template <class Body>
int with_tmpfs(const std::string& path, const char* size, const Body& body) {
  return in_child([&] {
    const uid_t user = ::getuid();
    if (::unshare(user == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", path.c_str(), "tmpfs", 0, size) != 0) {
      return 77;
    }
    return body();
  });
}

TEST(DiskFile, LeavesNoNameInItsFolder) {
  const TemporaryFolder folder;
  for (const bool unnamed : {true, false}) {
    DiskFile file({.folders = {folder.path()}, .nbytes = 1 << 20, .allow_unnamed = unnamed});
    EXPECT_THAT(folder.names(), IsEmpty());
    EXPECT_EQ(file.nbytes(), std::size_t{1} << 20);
    EXPECT_THAT(file.name(0), HasSubstr(folder.path()));
  }
}

TEST(DiskFile, SetsItsSpaceAside) {
  const TemporaryFolder folder;
  DiskFile file({.folders = {folder.path()}, .nbytes = (8 << 20) + 1});
  EXPECT_EQ(file.nbytes(), (std::size_t{8} << 20) + kIoAlignment);
  struct stat facts{};
  ASSERT_EQ(::fstat(file.fd(0), &facts), 0);
  EXPECT_GE(static_cast<std::size_t>(facts.st_blocks) * 512, file.nbytes());
  EXPECT_EQ(facts.st_nlink, 0U);
}

TEST(DiskFile, StripesCoverEveryByteOnce) {
  const TemporaryFolder a;
  const TemporaryFolder b;
  const TemporaryFolder c;
  const std::size_t stripe = 8192;
  const DiskFile file({.folders = {a.path(), b.path(), c.path()}, .nbytes = 100 * 4096, .stripe_nbytes = stripe});
  ASSERT_EQ(file.num_files(), 3U);
  std::vector<std::vector<int>> seen(3, std::vector<int>(100, 0));
  for (std::uint64_t offset = 0; offset < file.nbytes(); offset += 4096) {
    const FilePlace place = file.place(offset, file.nbytes() - offset);
    EXPECT_EQ(place.offset % 4096, 0U);
    EXPECT_LT(place.offset, file.trial_offset(place.file));
    EXPECT_EQ(place.nbytes, std::min<std::size_t>(stripe - offset % stripe, file.nbytes() - offset));
    EXPECT_EQ(seen[place.file][place.offset / 4096]++, 0);
  }
  EXPECT_THROW(static_cast<void>(file.place(4096, file.nbytes())), InternalError);
}

TEST(DiskFile, RefusesWhatIsNoFolderToWriteTo) {
  const TemporaryFolder folder;
  const std::string missing = folder.path() + "/missing";
  const std::string plain = folder.path() + "/plain";
  std::ofstream(plain) << "text";
  EXPECT_THAT(io_error_of([&] { DiskFile({.folders = {missing}, .nbytes = 4096}); }, ENOENT), HasSubstr(missing));
  EXPECT_THAT(io_error_of([&] { DiskFile({.folders = {plain}, .nbytes = 4096}); }, ENOTDIR), HasSubstr(plain));
  EXPECT_THROW(DiskFile({.folders = {}, .nbytes = 4096}), ConfigError);
  EXPECT_THROW(DiskFile({.folders = {folder.path()}, .nbytes = 4096, .stripe_nbytes = 1000}), ConfigError);
}

TEST(DiskFile, RefusesAFolderThatIsReadOnly) {
  const TemporaryFolder folder;
  const int code = in_child([&] {
    int expected = EROFS;
    if (::getuid() != 0) {
      ::chmod(folder.path().c_str(), 0500);
      expected = EACCES;
    } else if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
               ::mount("tmpfs", folder.path().c_str(), "tmpfs", MS_RDONLY, "size=1m") != 0) {
      // A container's root that may not mount can still be nobody, whom permissions bind.
      ::chmod(folder.path().c_str(), 0500);
      expected = ::setuid(65534) == 0 ? EACCES : 0;
    }
    const auto text = io_error_of([&] { DiskFile({.folders = {folder.path()}, .nbytes = 4096}); }, expected);
    return text.find(folder.path()) != std::string::npos && !::testing::Test::HasFailure() ? 0 : 1;
  });
  EXPECT_EQ(code, 0);
}

TEST(DiskFile, SaysBytesWantedAndFreeWhenThereIsNoRoom) {
  const TemporaryFolder folder;
  const std::size_t wanted = std::size_t{1} << 60;
  EXPECT_THAT(io_error_of([&] { DiskFile({.folders = {folder.path()}, .nbytes = wanted}); }, ENOSPC),
              AllOf(HasSubstr(folder.path()), HasSubstr(std::to_string(wanted + kIoAlignment)), HasSubstr("free")));
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(DiskFile, RefusesAFullDiskAndAFileSizeLimit) {
  const TemporaryFolder folder;
  const int code = with_tmpfs(folder.path(), "size=1m", [&] {
    const auto text = io_error_of([&] { DiskFile({.folders = {folder.path()}, .nbytes = 4 << 20}); }, ENOSPC);
    return text.find("wanted") != std::string::npos && !::testing::Test::HasFailure() ? 0 : 1;
  });
  EXPECT_THAT(code, AnyOf(0, 77));
  const int limited = in_child([&] {
    struct rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto text = io_error_of([&] { DiskFile({.folders = {folder.path()}, .nbytes = 4 << 20}); }, EFBIG);
    return text.find(folder.path()) != std::string::npos && !::testing::Test::HasFailure() ? 0 : 1;
  });
  EXPECT_EQ(limited, 0);
}

TEST(DiskFile, UsesAMemoryFileSystemThroughThePageCacheAndSaysSo) {
  const TemporaryFolder folder;
  const int code = with_tmpfs(folder.path(), "size=4m", [&] {
    const DiskFile file({.folders = {folder.path()}, .nbytes = 1 << 20});
    EXPECT_FALSE(file.is_direct());
    EXPECT_THAT(file.notes(), Contains(AllOf(HasSubstr(folder.path()), HasSubstr("tmpfs"))));
    EXPECT_THAT(file.notes(), Contains(HasSubstr("page cache")));
    return ::testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_THAT(code, AnyOf(0, 77));
}

TEST(DiskFile, GivesItsSpaceBackWhenClosed) {
  const TemporaryFolder folder;
  const std::size_t nbytes = std::size_t{256} << 20;
  const auto before = look_at_folder(folder.path()).free_bytes;
  DiskFile file({.folders = {folder.path()}, .nbytes = nbytes});
  const auto with_it = look_at_folder(folder.path()).free_bytes;
  file.close();
  EXPECT_EQ(file.num_files(), 0U);
  EXPECT_LT(with_it, before);
}

TEST(Folder, WarnsOfWhatIsNoLocalDisk) {
  FolderInfo folder{.path = "/x", .file_system = "ext4", .free_bytes = 50, .total_bytes = 100};
  EXPECT_THAT(folder_warnings(folder), IsEmpty());
  folder.file_system = "nfs";
  folder.is_network = true;
  EXPECT_THAT(folder_warnings(folder), ::testing::ElementsAre(AllOf(HasSubstr("/x"), HasSubstr("nfs"))));
  folder.copies_on_write = true;
  folder.is_in_memory = true;
  folder.free_bytes = 5;
  EXPECT_THAT(folder_warnings(folder), SizeIs(4));
}

TEST(OwnedFd, IsClosedInForkedChildren) {
  const TemporaryFolder folder;
  const DiskFile file({.folders = {folder.path()}, .nbytes = 4096});
  const int fd = file.fd(0);
  EXPECT_EQ(in_child([&] { return ::fcntl(fd, F_GETFD) == -1 ? 0 : 1; }), 0);
  EXPECT_NE(::fcntl(fd, F_GETFD), -1);
}

}  // namespace
}  // namespace pannier
