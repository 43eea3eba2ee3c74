package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/mlxcel/mlxcel/host/cluster"
)

// checkSecret reads the secret as a node would.
func (e *examination) checkSecret() Finding {
	const name = "secret"
	secret, err := cluster.LoadSecret(e.cfg.Secret)
	e.secret = secret
	if bad, is := errors.AsType[*cluster.SecretError](err); is {
		return badSecret(bad)
	}
	if err != nil {
		what, remedy := split(err.Error())
		return fail(name, remedy, "%s", what)
	}
	from, path := secretFrom(e.cfg.Secret)
	if path == "" {
		return ok(name, "%s holds a good one; a file keeps it from other programs of this user", from)
	}
	info, err := os.Stat(path)
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return warn(name, "run `chmod 600 "+path+"`", "%s %s is good, but others than its owner may use it (mode %04o)", from, path, info.Mode().Perm())
	}
	return ok(name, "%s %s is good, and only its owner can use it", from, path)
}

func badSecret(bad *cluster.SecretError) Finding {
	const name = "secret"
	what, remedy := bad.Reason, "give this user the right to read it, or give another file with "+cluster.FlagSecretFile
	if bad.Err == nil || errors.Is(bad.Err, fs.ErrNotExist) {
		what, remedy = split(bad.Reason)
	}
	where := bad.Source
	if bad.Path != "" {
		where = fmt.Sprintf("%s %s", bad.Source, bad.Path)
	}
	return fail(name, remedy, "%s: %s", where, what)
}

// secretFrom names the source that counts, and its file where it is one.
func secretFrom(s cluster.SecretSource) (from, path string) {
	switch {
	case s.File != "":
		return cluster.FlagSecretFile, s.File
	case s.EnvFile != "":
		return cluster.EnvSecretFile, s.EnvFile
	case s.EnvValue != "":
		return cluster.EnvSecret, ""
	}
	return "[cluster] secret_file", s.TOMLFile
}
