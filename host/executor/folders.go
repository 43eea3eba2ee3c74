package executor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// folder is one place where executors are looked for.
type folder struct {
	path   string
	asked  bool   // named by the operator: its absence is worth a word
	source string // what named it, for messages
}

// pluginFolders returns the folders to search, in order, without repetition.
func pluginFolders(cfg *Config, goos string) []folder {
	env := environment(cfg.Environ)
	var all []folder
	for _, dir := range cfg.PluginDirs {
		all = append(all, folder{dir, true, "--plugin-dir"})
	}
	for _, dir := range filepath.SplitList(env["MLXCEL_PLUGIN_DIR"]) {
		all = append(all, folder{dir, true, "MLXCEL_PLUGIN_DIR"})
	}
	if cfg.Executable != "" {
		exe := cfg.Executable
		if real, err := filepath.EvalSymlinks(exe); err == nil {
			exe = real
		}
		all = append(all, folder{filepath.Join(filepath.Dir(exe), "plugins"), false, "beside the executable"})
	}
	if dir := userPlugins(env, goos); dir != "" {
		all = append(all, folder{dir, false, "the user's data folder"})
	}
	return distinct(all)
}

// userPlugins is the plugin folder in the user's data folder, by the XDG base directory specification or by
// Apple's file system guide; empty when the environment names no home.
func userPlugins(env map[string]string, goos string) string {
	home := env["HOME"]
	switch {
	case goos == "darwin" && home != "":
		return filepath.Join(home, "Library", "Application Support", "mlxcel", "plugins")
	case goos == "darwin":
		return ""
	case filepath.IsAbs(env["XDG_DATA_HOME"]):
		return filepath.Join(env["XDG_DATA_HOME"], "mlxcel", "plugins")
	case home != "":
		return filepath.Join(home, ".local", "share", "mlxcel", "plugins")
	}
	return ""
}

func distinct(all []folder) []folder {
	seen := map[string]bool{}
	var out []folder
	for _, f := range all {
		if f.path == "" {
			continue
		}
		key := f.path
		if abs, err := filepath.Abs(key); err == nil {
			key = abs
		}
		if real, err := filepath.EvalSymlinks(key); err == nil {
			key = real
		}
		if !seen[key] {
			seen[key] = true
			out = append(out, f)
		}
	}
	return out
}

// candidates lists the executables of a folder by name. Files that can be no program are passed over in
// silence; a program without the execute permission comes back with a problem.
func candidates(f folder) (paths []string, problems []Entry) {
	dir, err := filepath.Abs(f.path)
	if err != nil {
		return nil, []Entry{{Path: f.path, Problem: err}}
	}
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if f.asked {
			problems = append(problems, Entry{Path: dir, Problem: fmt.Errorf("no such folder: named by %s", f.source)})
		}
		return nil, problems
	}
	if err != nil {
		return nil, []Entry{{Path: dir, Problem: fmt.Errorf("read the plugin folder: %w", err)}}
	}
	for _, e := range list {
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path) // follows links
		if err != nil || !info.Mode().IsRegular() || passedOver(e.Name()) {
			continue
		}
		switch {
		case info.Mode().Perm()&0o111 != 0:
			paths = append(paths, path)
		case isProgram(path):
			problems = append(problems, Entry{Path: path, Name: e.Name(), Problem: &NotExecutableError{Path: path}})
		}
	}
	return paths, problems
}

// passedOver names what lies beside executors without being one: hidden files, checksums, shared libraries.
func passedOver(name string) bool {
	return strings.HasPrefix(name, ".") || strings.HasSuffix(name, checksumSuffix) ||
		strings.HasSuffix(name, ".so") || strings.Contains(name, ".so.") || strings.HasSuffix(name, ".dylib")
}

// isProgram tells from its first bytes whether a file is an ELF or Mach-O program or a script.
func isProgram(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [4]byte
	n, _ := f.Read(head[:])
	switch string(head[:n]) {
	case "\x7fELF", "\xcf\xfa\xed\xfe", "\xca\xfe\xba\xbe":
		return true
	}
	return strings.HasPrefix(string(head[:n]), "#!")
}
