package securelink

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

func TestSecretLength(t *testing.T) {
	if _, err := NewSecret(make([]byte, MinSecret)); err != nil {
		t.Error(err)
	}
	_, err := NewSecret(make([]byte, MinSecret-1))
	short, ok := errors.AsType[*ShortSecretError](err)
	if !ok || short.Got != MinSecret-1 {
		t.Errorf("got %v", err)
	}
}

func TestSecretKeepsACopy(t *testing.T) {
	raw := []byte("0123456789abcdef")
	s, err := NewSecret(raw)
	if err != nil {
		t.Fatal(err)
	}
	before := s.Key("test")
	raw[0]++
	if !bytes.Equal(before, s.Key("test")) {
		t.Error("the secret changed with its source")
	}
	if bytes.Equal(before, s.Key("another")) {
		t.Error("two purposes share a key")
	}
}

// Whatever prints a secret, or something that holds one, prints none of its bytes.
func TestSecretIsNeverPrinted(t *testing.T) {
	const raw = "ABCDEFGHIJKLMNOPQRSTUVWX"
	s := testSecret(t, raw)
	cfg := Config{Secret: s}
	type hidden struct{ secret Secret }
	within := hidden{s}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%b", "%o", "%c", "%U"} {
		for _, value := range []any{s, &s, cfg, &cfg, []Secret{s}, map[string]Secret{"a": s}, within, &within, ListenerConfig{Config: cfg}} {
			fmt.Fprintf(&out, verb+"\n", value)
		}
	}
	fmt.Fprintln(&out, s, cfg, within)
	slog.New(slog.NewTextHandler(&out, nil)).Info("secret", "s", s, "cfg", cfg)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("secret", "s", s, "cfg", cfg)
	for _, asJSON := range []bool{false, true} {
		hclog.New(&hclog.LoggerOptions{Output: &out, JSONFormat: asJSON}).Info("secret", "s", s, "p", &s, "all", []Secret{s}, "cfg", cfg)
	}
	if b, err := json.Marshal(map[string]any{"s": s, "within": within}); err == nil {
		out.Write(b)
	} else {
		t.Error(err)
	}
	if !strings.Contains(out.String(), redacted) {
		t.Error("nothing was printed at all")
	}
	for _, form := range []string{raw[:4], "41424344", "65 66 67", "65,66,67", "0x41", "QUJDRA", `\x41`} {
		if i := strings.Index(out.String(), form); i >= 0 {
			t.Errorf("printed as %q: ...%s...", form, out.String()[max(0, i-100):i+20])
		}
	}
}
