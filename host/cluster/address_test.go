package cluster

import (
	"strings"
	"testing"
)

func TestParseAddress(t *testing.T) {
	for _, tc := range []struct{ text, key string }{
		{"192.168.1.11:19001", "192.168.1.11:19001"},
		{"[fd00::11]:19001", "[fd00::11]:19001"},
		{"[FD00:0:0::11]:19001", "[fd00::11]:19001"},
		{"[::ffff:10.0.0.1]:1", "10.0.0.1:1"},
		{"[fe80::1%en0]:1", "[fe80::1%en0]:1"},
		{"Studio-2.local:65535", "studio-2.local:65535"},
		{"studio-2.local.:65535", "studio-2.local:65535"},
		{"under_score:1", "under_score:1"},
		{":0", ":0"},
	} {
		a, err := ParseAddress(tc.text)
		if err != nil || a.Key() != tc.key || a.String() != tc.text {
			t.Errorf("%s: key %s, text %s, error %v", tc.text, a.Key(), a, err)
		}
	}
	for text, want := range map[string]string{
		"":                "port is missing",
		"10.0.0.1":        "port is missing",
		"fd00::1":         "port is missing",
		"fd00::1:19001:x": "brackets",
		"10.0.0.1:x":      "not a number",
		"10.0.0.1:":       "not a number",
		"10.0.0.1:70000":  "not a number",
		"10.0.0.1:-1":     "not a number",
		"10.0.0.1:080":    "not a number",
		"10.0.0.256:1":    "neither",
		"10.0.0.01:1":     "neither",
		"10.0.1:1":        "neither",
		"[10.0.0.1]:1":    "brackets are for IPv6",
		"[studio]:1":      "neither",
		"-x:1":            "neither",
		"a..b:1":          "neither",
		"a b:1":           "neither",
		"http://a:1":      "brackets",
		"bücher:1":        "neither",
	} {
		a, err := ParseAddress(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, error %v, want %q", text, a, err, want)
		}
	}
}

func TestReachable(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1:1": "", "studio:1": "", "[::1]:1": "",
		"0.0.0.0:1": "wildcard", "[::]:1": "wildcard", ":1": "wildcard", "[::ffff:0.0.0.0]:1": "wildcard",
		"224.0.0.1:1": "no single machine", "255.255.255.255:1": "no single machine", "10.0.0.1:0": "port 0",
	} {
		a, err := ParseAddress(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if err = a.Reachable(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
