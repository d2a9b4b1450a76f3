# A Rust compiler: one on PATH if it is new enough, else the distribution's.
RUST_MIN=1.78

rust_ok() {
  command -v cargo >/dev/null && command -v rustc >/dev/null &&
    version_at_least "$(rustc --version | cut -d' ' -f2)" "$RUST_MIN"
}

rust_install() {
  case $(os_id) in
    debian-12) apt_install rustc-web cargo-web ;; # kept current for browsers; plain rustc is 1.63
    ubuntu-24.04) apt_install rustc-1.80 cargo-1.80 ;;
    *) apt_install rustc cargo ;;
  esac
}

# Ubuntu's versioned packages put their tools beside PATH.
rust_path() {
  local dir
  rust_ok && return 0
  for dir in /usr/lib/rust-1.80/bin; do
    [ -x "$dir/cargo" ] && PATH=$dir:$PATH
  done
  export PATH
}

rust_ready() {
  rust_path
  rust_ok || rust_install
  rust_path
  rust_ok || die "no Rust of at least $RUST_MIN: $(rustc --version 2>&1 || true)"
}

rust_target() { rustc -vV | sed -n 's/^host: //p'; }
