package cluster

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// Where a secret may come from.
const (
	EnvSecretFile = "MLXCEL_CLUSTER_SECRET_FILE" // a path
	EnvSecret     = "MLXCEL_CLUSTER_SECRET"      // the value
	keySecretFile = "[cluster] secret_file"
)

const (
	// maxSecret bounds what is read of a file that is no secret at all.
	maxSecret = 4096
	// newSecret is the number of random bytes of a secret that NewSecretFile makes.
	newSecret = 32

	newSecretCommand = "mlxcel cluster secret new cluster.secret"
)

// ErrNoSecret is a start without any secret.
var ErrNoSecret = fmt.Errorf("no cluster secret, and no node of a cluster starts without one: give %s PATH, or set %s to a path, or set %s to the value, or put secret_file = \"PATH\" into the [cluster] section of the cluster TOML; make one with `%s` and copy it to every host",
	FlagSecretFile, EnvSecretFile, EnvSecret, newSecretCommand)

// SecretError is a secret that can't be used. It never holds any of the secret's bytes.
type SecretError struct {
	Source string // the flag, variable or key that gave it
	Path   string // empty where the value was given
	Reason string // with what to do
	Err    error  // what the system said, nil if nothing
}

func (e *SecretError) Error() string {
	where := e.Source
	if e.Path != "" {
		where += " " + e.Path
	}
	return fmt.Sprintf("cluster secret of %s: %s", where, e.Reason)
}

// Unwrap returns what the system said.
func (e *SecretError) Unwrap() error { return e.Err }

// SecretSource holds the values of the four places that a secret is looked for in, in their order. The first that is set
// counts, whether its secret is good or not.
type SecretSource struct {
	File     string // --cluster-secret-file
	EnvFile  string // MLXCEL_CLUSTER_SECRET_FILE
	EnvValue string // MLXCEL_CLUSTER_SECRET
	TOMLFile string // [cluster] secret_file, resolved

	// AllowLoose takes a file that others than its owner can read. Off by default.
	AllowLoose bool
}

// LoadSecret returns the secret of a cluster, without the newline that ends it where one does. It is ErrNoSecret where no source is
// set, and a *SecretError where a source is set and is no good.
func LoadSecret(s SecretSource) (securelink.Secret, error) {
	switch {
	case s.File != "":
		return readSecret(FlagSecretFile, s.File, s.AllowLoose)
	case s.EnvFile != "":
		return readSecret(EnvSecretFile, s.EnvFile, s.AllowLoose)
	case s.EnvValue != "":
		return checkSecret(EnvSecret, "", []byte(s.EnvValue))
	case s.TOMLFile != "":
		return readSecret(keySecretFile, s.TOMLFile, s.AllowLoose)
	}
	return securelink.Secret{}, ErrNoSecret
}

func readSecret(source, path string, allowLoose bool) (securelink.Secret, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return securelink.Secret{}, &SecretError{source, path, fmt.Sprintf("there is no such file: copy it from another host of the cluster, or make the first with `%s`", newSecretCommand), err}
	}
	if err != nil {
		return securelink.Secret{}, &SecretError{source, path, err.Error(), err}
	}
	defer f.Close()
	// What is open is what is checked and read, whatever happens to the path meanwhile.
	st, err := f.Stat()
	if err != nil {
		return securelink.Secret{}, &SecretError{source, path, err.Error(), err}
	}
	if st.IsDir() {
		return securelink.Secret{}, &SecretError{source, path, "is a folder: give the file that holds the secret", nil}
	}
	if mode := st.Mode().Perm(); mode&0o077 != 0 && !allowLoose {
		return securelink.Secret{}, &SecretError{source, path, fmt.Sprintf("others than its owner may use the file (mode %04o): run `chmod 600 %s`, or allow it with %s", mode, path, FlagLooseSecret), nil}
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return securelink.Secret{}, &SecretError{source, path, err.Error(), err}
	}
	return checkSecret(source, path, raw)
}

func checkSecret(source, path string, raw []byte) (securelink.Secret, error) {
	if trimmed, ok := bytes.CutSuffix(raw, []byte("\n")); ok {
		raw = bytes.TrimSuffix(trimmed, []byte("\r")) // a file that passed through Windows is the same secret
	}
	switch n := len(raw); {
	case n < securelink.MinSecret:
		return securelink.Secret{}, &SecretError{source, path, fmt.Sprintf("it has %d bytes, want at least %d: make one with `%s` and copy it to every host", n, securelink.MinSecret, newSecretCommand), nil}
	case n > maxSecret:
		return securelink.Secret{}, &SecretError{source, path, fmt.Sprintf("it has more than %d bytes, so it is no secret: check the path", maxSecret), nil}
	}
	return securelink.NewSecret(raw)
}

// NewSecretFile writes a new secret, 256 bits of random in hexadecimal, to a file that only its owner can read. A file that exists
// is kept, and an error.
func NewSecretFile(path string, random io.Reader) error {
	raw := make([]byte, newSecret)
	if _, err := io.ReadFull(random, raw); err != nil {
		return fmt.Errorf("random bytes for %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s exists and is kept, as hosts may have copies of it: give another name, or remove it first: %w", path, fs.ErrExist)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, hex.EncodeToString(raw))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}
