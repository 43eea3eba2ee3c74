package executor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestPluginFolders(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "mlxcel")
	beside := filepath.Join(filepath.Dir(exe), "plugins")
	for _, c := range []struct {
		name string
		cfg  Config
		goos string
		want []string
	}{
		{"nothing known", Config{}, "linux", nil},
		{"order", Config{
			PluginDirs: []string{"/a", "/b"},
			Executable: exe,
			Environ:    []string{"MLXCEL_PLUGIN_DIR=/c:/d", "HOME=/home/u"},
		}, "linux", []string{"/a", "/b", "/c", "/d", beside, "/home/u/.local/share/mlxcel/plugins"}},
		{"XDG_DATA_HOME", Config{Environ: []string{"HOME=/home/u", "XDG_DATA_HOME=/data"}}, "linux", []string{"/data/mlxcel/plugins"}},
		{"relative XDG_DATA_HOME is invalid", Config{Environ: []string{"HOME=/home/u", "XDG_DATA_HOME=data"}}, "linux", []string{"/home/u/.local/share/mlxcel/plugins"}},
		{"macOS", Config{Environ: []string{"HOME=/Users/u", "XDG_DATA_HOME=/data"}}, "darwin", []string{"/Users/u/Library/Application Support/mlxcel/plugins"}},
		{"macOS without home", Config{}, "darwin", nil},
		{"named twice", Config{PluginDirs: []string{"/a", "/a/", "/b/../a"}, Environ: []string{"MLXCEL_PLUGIN_DIR=/a::/b"}}, "linux", []string{"/a", "/b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, f := range pluginFolders(&c.cfg, c.goos) {
				got = append(got, f.path)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("folders %q, want %q", got, c.want)
			}
		})
	}
}

func TestPluginFoldersFollowLinks(t *testing.T) {
	real, other := t.TempDir(), t.TempDir()
	writeFile(t, filepath.Join(real, "mlxcel"), "", 0o755)
	link := filepath.Join(other, "mlxcel")
	if err := os.Symlink(filepath.Join(real, "mlxcel"), link); err != nil {
		t.Fatal(err)
	}
	resolved, err := filepath.EvalSymlinks(real)
	if err != nil {
		t.Fatal(err)
	}
	got := pluginFolders(&Config{Executable: link}, "linux")
	if want := filepath.Join(resolved, "plugins"); len(got) != 1 || got[0].path != want {
		t.Errorf("folders %+v, want only %s", got, want)
	}
}

func TestCandidates(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "b"), "#!/bin/sh\n", 0o755)
	writeFile(t, filepath.Join(dir, "a"), "\x7fELF", 0o755)
	writeFile(t, filepath.Join(dir, "forgotten"), "\x7fELF", 0o644)
	writeFile(t, filepath.Join(dir, "README.md"), "text", 0o644)
	writeFile(t, filepath.Join(dir, "a.sha256"), sumA, 0o755)
	writeFile(t, filepath.Join(dir, ".hidden"), "#!", 0o755)
	writeFile(t, filepath.Join(dir, "libmlx.so"), "\x7fELF", 0o755)
	writeFile(t, filepath.Join(dir, "libmlx.so.1"), "\x7fELF", 0o755)
	writeFile(t, filepath.Join(dir, "libmlx.dylib"), "\xcf\xfa\xed\xfe", 0o755)
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"link": "b", "dangling": "nowhere"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	paths, problems := candidates(folder{path: dir})
	var names []string
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	if want := []string{"a", "b", "link"}; !slices.Equal(names, want) {
		t.Errorf("candidates %q, want %q", names, want)
	}
	if len(problems) != 1 || problems[0].Name != "forgotten" {
		t.Fatalf("problems %+v, want one, with forgotten", problems)
	}
	checkText(t, problems[0].Problem, "chmod +x "+filepath.Join(dir, "forgotten"))
}

func TestCandidatesOfMissingFolder(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none")
	if _, problems := candidates(folder{path: missing}); len(problems) != 0 {
		t.Errorf("problems %+v for a folder nobody named, want none", problems)
	}
	_, problems := candidates(folder{path: missing, asked: true, source: "--plugin-dir"})
	if len(problems) != 1 || !strings.Contains(problems[0].Problem.Error(), "--plugin-dir") {
		t.Errorf("problems %+v, want one that names --plugin-dir", problems)
	}
}

func TestTrust(t *testing.T) {
	me := os.Getuid()
	for _, c := range []struct {
		name         string
		folder, file os.FileMode
		uid          int
		err          string
	}{
		{"own", 0o755, 0o755, me, ""},
		{"group may write", 0o775, 0o775, me, ""},
		{"everybody may write the file", 0o755, 0o757, me, "chmod o-w"},
		{"everybody may write the folder", 0o777, 0o755, me, "chmod o-w"},
		{"everybody may write the sticky folder", 0o777 | os.ModeSticky, 0o755, me, "chmod o-w"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "plugins")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "tool")
			writeFile(t, path, "", c.file)
			if err := os.Chmod(dir, c.folder); err != nil {
				t.Fatal(err)
			}
			err := checkTrust(path, c.uid)
			checkText(t, err, c.err)
			// A link elsewhere changes nothing: it is the target that counts.
			link := filepath.Join(t.TempDir(), "link")
			if err := os.Symlink(path, link); err != nil {
				t.Fatal(err)
			}
			checkText(t, checkTrust(link, c.uid), c.err)
		})
	}
}

func TestTrustOfOwners(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tool")
	writeFile(t, path, "", 0o755)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	owner := ownerOf(info)
	if err := trusted(path, info, owner); err != nil {
		t.Errorf("own file: %v", err)
	}
	err = trusted(path, info, owner+1)
	if owner == 0 {
		checkText(t, err, "") // root's files are everybody's to run
	} else {
		checkText(t, err, "chown")
	}
	checkText(t, trusted(path, foreign{info}, 1000), "belongs to user 4242")
}
