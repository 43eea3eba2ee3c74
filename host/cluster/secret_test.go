package cluster

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/securelink"
)

const good = "0123456789abcdef"

func secretFile(t *testing.T, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cluster.secret")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // whatever the umask is
		t.Fatal(err)
	}
	return path
}

func same(a, b securelink.Secret) bool { return bytes.Equal(a.Key("test"), b.Key("test")) }

func mustSecret(t *testing.T, raw string) securelink.Secret {
	t.Helper()
	s, err := securelink.NewSecret([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The first of the four sources that is set counts.
func TestSecretSourcesInOrder(t *testing.T) {
	values := []string{"from the flag.....", "from the path var.", "from the value var", "from the toml....."}
	source := SecretSource{
		File: secretFile(t, values[0], 0o600), EnvFile: secretFile(t, values[1], 0o600),
		EnvValue: values[2], TOMLFile: secretFile(t, values[3], 0o400),
	}
	for i, clear := range []func(){func() { source.File = "" }, func() { source.EnvFile = "" }, func() { source.EnvValue = "" }, func() { source.TOMLFile = "" }} {
		got, err := LoadSecret(source)
		if err != nil || !same(got, mustSecret(t, values[i])) {
			t.Errorf("source %d does not count: %v", i, err)
		}
		clear()
	}
	_, err := LoadSecret(source)
	if !errors.Is(err, ErrNoSecret) {
		t.Fatalf("without a source: %v", err)
	}
	for _, want := range []string{"--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET ", "[cluster]", "secret_file", "mlxcel cluster secret new"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %q: %v", want, err)
		}
	}
}

// A source that is set and bad is not passed over for the next.
func TestABadSecretIsNotPassedOver(t *testing.T) {
	_, err := LoadSecret(SecretSource{File: filepath.Join(t.TempDir(), "absent"), EnvValue: good})
	if s, ok := errors.AsType[*SecretError](err); !ok || s.Source != FlagSecretFile || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestSecretIsTrimmedOnce(t *testing.T) {
	for content, want := range map[string]string{
		good:              good,
		good + "\n":       good,
		good + "\r\n":     good,
		good + "\n\n":     good + "\n",
		good + " ":        good + " ",
		"\n" + good:       "\n" + good,
		good + "\x00\xff": good + "\x00\xff",
	} {
		fromFile, err := LoadSecret(SecretSource{File: secretFile(t, content, 0o600)})
		if err != nil || !same(fromFile, mustSecret(t, want)) {
			t.Errorf("file %q: %v", content, err)
		}
		fromValue, err := LoadSecret(SecretSource{EnvValue: content})
		if err != nil || !same(fromValue, fromFile) {
			t.Errorf("value %q differs from the file: %v", content, err)
		}
	}
}

func TestSecretIsRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		load func() (securelink.Secret, error)
		want []string
	}{
		{"15 bytes and a newline", func() (securelink.Secret, error) {
			return LoadSecret(SecretSource{File: secretFile(t, good[1:]+"\n", 0o600)})
		}, []string{"has 15 bytes, want at least 16", "mlxcel cluster secret new"}},
		{"a short value", func() (securelink.Secret, error) { return LoadSecret(SecretSource{EnvValue: "hunter2"}) },
			[]string{"MLXCEL_CLUSTER_SECRET:", "has 7 bytes"}},
		{"an empty file", func() (securelink.Secret, error) { return LoadSecret(SecretSource{TOMLFile: secretFile(t, "", 0o600)}) },
			[]string{"[cluster] secret_file", "has 0 bytes"}},
		{"a large file", func() (securelink.Secret, error) {
			return LoadSecret(SecretSource{File: secretFile(t, strings.Repeat("x", maxSecret+1), 0o600)})
		}, []string{"check the path"}},
		{"a folder", func() (securelink.Secret, error) { return LoadSecret(SecretSource{EnvFile: t.TempDir()}) }, []string{"is a folder"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := tc.load()
			if _, ok := errors.AsType[*SecretError](err); !ok || !s.IsZero() {
				t.Fatalf("secret %v, error %v", s, err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), good[1:]) {
				t.Errorf("the error tells the secret: %v", err)
			}
		})
	}
}

func TestSecretReadableByOthers(t *testing.T) {
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o644, 0o666} {
		path := secretFile(t, good, mode)
		_, err := LoadSecret(SecretSource{File: path})
		if err == nil || !strings.Contains(err.Error(), "chmod 600 "+path) || !strings.Contains(err.Error(), fmt.Sprintf("%04o", mode)) {
			t.Errorf("mode %04o: %v", mode, err)
		}
		if _, err := LoadSecret(SecretSource{File: path, AllowLoose: true}); err != nil {
			t.Errorf("mode %04o, allowed: %v", mode, err)
		}
	}
}

func TestNewSecretFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cluster.secret")
	if err := NewSecretFile(path, rand.Reader); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 || st.Size() != 65 {
		t.Fatalf("%v, %v", st, err)
	}
	first, err := LoadSecret(SecretSource{File: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := NewSecretFile(path, rand.Reader); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second time: %v", err)
	}
	if again, err := LoadSecret(SecretSource{File: path}); err != nil || !same(first, again) {
		t.Errorf("the file has changed: %v", err)
	}
	other := path + "2"
	if err := NewSecretFile(other, strings.NewReader("too little")); err == nil {
		t.Error("made from too little random")
	}
	if _, err := os.Stat(other); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a failure leaves a file: %v", err)
	}
}
