# mkfs.erofs 1.8.6, static, built from Debian's source package when the distribution's cannot read a tar stream.
# Debian 12 has 1.5, without --tar. Building takes about 20 s; the result is kept in $CACHE by version.
EROFS_VERSION=1.8.6
EROFS_SHA256=5b221dc3fd6d151425b30534ede46fb7a90dc233a8659cba0372796b0a066547
EROFS_BUILD_PACKAGES=(gcc make autoconf automake libtool pkg-config liblz4-dev libzstd-dev dpkg-dev debian-archive-keyring)

erofs_wanted() { ! { mkfs.erofs --help 2>&1 | grep -q -- '--mkfs-time' && mkfs.erofs --help 2>&1 | grep -q -- '--tar='; }; }
erofs_present() { [ "$(cat "$CACHE/bin/mkfs.erofs.version" 2>/dev/null)" = "$EROFS_VERSION" ] && [ -x "$CACHE/bin/mkfs.erofs" ]; }

erofs_build() {
  local work
  apt_install "${EROFS_BUILD_PACKAGES[@]}"
  work=$(mktemp -d "$CACHE/erofs-utils.XXXXXX")
  # shellcheck disable=SC2064 # the value of now
  trap "rm -rf '$work'" EXIT
  erofs_source "$work"
  cd "$work/src"
  autoreconf -fi
  ./configure --disable-fuse --disable-lzma --without-selinux --without-uuid --without-xxhash --without-zlib \
    --without-libdeflate --enable-lz4 --with-libzstd
  # "-static" alone is eaten by libtool.
  nice make -j"$(nproc)" LDFLAGS=-all-static
  mkdir -p "$CACHE/bin"
  local tool
  for tool in mkfs fsck dump; do
    strip "$tool/$tool.erofs"
    install -m 755 "$tool/$tool.erofs" "$CACHE/bin/.$tool.erofs.new"
    mv "$CACHE/bin/.$tool.erofs.new" "$CACHE/bin/$tool.erofs"
  done
  printf '%s' "$EROFS_VERSION" >"$CACHE/bin/mkfs.erofs.version"
}

# Debian's source package by its own apt lists, so the machine's sources stay as they are; apt checks the signature.
erofs_source() {
  local work=$1
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/src"
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" \
    >"$work/sources.list"
  cat >"$work/apt.conf" <<CONF
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
CONF
  (cd "$work" && APT_CONFIG=$work/apt.conf apt-get update &&
    APT_CONFIG=$work/apt.conf apt-get source --download-only "erofs-utils=$EROFS_VERSION-1")
  echo "$EROFS_SHA256  $work/erofs-utils_$EROFS_VERSION.orig.tar.gz" | sha256sum -c -
  tar -xf "$work/erofs-utils_$EROFS_VERSION.orig.tar.gz" -C "$work/src" --strip-components=1
}
