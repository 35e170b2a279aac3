# Installs the library, its headers and what find_package(Pannier) reads.
include(CMakePackageConfigHelpers)
install(TARGETS pannier LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/pannier DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
        PATTERN binding EXCLUDE)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/PannierConfig.cmake.in ${PROJECT_BINARY_DIR}/PannierConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Pannier PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/PannierConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/PannierConfig.cmake ${PROJECT_BINARY_DIR}/PannierConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/PannierTorch.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Pannier)
