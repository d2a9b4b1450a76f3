# The frameworks of the lane `adapters` and what a node needs, in an environment of their own: they ask for other versions
# of things than we do. Kept in $CACHE by what it is made of, for all clones; $VENV/adapters leads to this clone's.
ADAPTERS_PINS=$ROOT/tests/adapters/requirements.txt
# One that no clone has set up for this long goes.
ADAPTERS_KEPT_DAYS=30

adapters_needs() {
  cat "$ADAPTERS_PINS"
  "$VENV/bin/python" - "$ROOT/pyproject.toml" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["node"]
wanted += [need for need in project["optional-dependencies"]["dev"] if need.startswith("pytest")]
print("\n".join(sorted(set(wanted))))
PY
}

adapters_venv() {
  local needs dir
  needs=$(adapters_needs)
  dir=$CACHE/venvs/adapters-$({ printf '%s\n' "$needs"; "$VENV/bin/python" -VV; } | sha256sum | cut -c1-16)
  if [ ! -e "$dir/complete" ]; then
    rm -rf "$dir"
    mkdir -p "$CACHE/venvs"
    "$VENV/bin/python" -c 'import sys, venv; venv.create(sys.argv[1], with_pip=True)' "$dir"
    printf '%s\n' "$needs" >"$dir/needs.txt"
    "$dir/bin/python" -m pip install -q -r "$dir/needs.txt"
    sed -n 's/^# beside: //p' "$dir/needs.txt" | xargs "$dir/bin/python" -m pip install -q --no-deps --target "$dir/beside"
  fi
  touch "$dir/complete"
  ln -sfn "$dir" "$VENV/adapters"
  find "$CACHE/venvs" -mindepth 2 -maxdepth 2 -name complete -mtime "+$ADAPTERS_KEPT_DAYS" -printf '%h\0' | xargs -0r rm -rf
}
