# Finds fmt and has its own headers found before those that lie among torch's: torch's fit no compiled fmt, and an fmt that
# every file compiles for itself is half of a build's time.
find_package(fmt REQUIRED)
find_path(PANNIER_FMT_INCLUDE_DIR fmt/format.h HINTS ENV CPATH PATHS /usr/include NO_CMAKE_FIND_ROOT_PATH REQUIRED)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/include_first)
file(CREATE_LINK ${PANNIER_FMT_INCLUDE_DIR}/fmt ${CMAKE_BINARY_DIR}/include_first/fmt SYMBOLIC)
include_directories(BEFORE SYSTEM ${CMAKE_BINARY_DIR}/include_first)
