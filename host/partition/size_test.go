package partition

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "4096": 4096, "12B": 12, "12 bytes": 12, "1KB": 1000, "1KiB": 1024, "2mb": 2e6, "2MiB": 2 << 20, "8GB": 8e9, " 8 GiB ": 8 << 30,
		"1TB": 1e12, "1TiB": 1 << 40, "1.5GiB": 3 << 29, "0.1KB": 100, "0.3B": 0, "0.1KiB": 102,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", " ", "GiB", "8G", "8GiBs", "-1", "-1GiB", "+1", "1e9", "0x10", "1/2", "1_000", "1,5GiB", ".5GiB", "1.GiB", "1.2.3", "NaN", "Inf", "ten", "1 2", "1048577TiB", "99999999999999999999", strings.Repeat("1", 1000)} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q: %d, want an error", text, got)
		}
	}
}

func TestFormatSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 29: "1.5 GiB", 1400e9: "1.3 TiB", 1 << 60: "1.0 EiB"} {
		if got := FormatSize(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestParseStageMemory(t *testing.T) {
	if got, err := ParseStageMemory("16GiB, 64GiB,1"); err != nil || !slices.Equal(got, []int64{16 << 30, 64 << 30, 1}) {
		t.Errorf("%v, %v", got, err)
	}
	for text, wants := range map[string][]string{
		"":            {"stage 0", "blank"},
		"8GiB,":       {"stage 1", "blank"},
		"8GiB,0":      {"stage 1", "0 bytes"},
		"0GiB,-3":     {"stage 0", "0 bytes", "stage 1", `"-3"`},
		"8G,lots,4TB": {"stage 0", `"8G"`, "GiB", "stage 1", `"lots"`},
	} {
		_, err := ParseStageMemory(text)
		var fault *FlagError
		if !errors.As(err, &fault) || fault.Flag != "--stage-memory" {
			t.Errorf("%q: %v, want a *FlagError", text, err)
			continue
		}
		for _, want := range wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v lacks %q", text, err, want)
			}
		}
	}
}

func TestParseSpeeds(t *testing.T) {
	if got, err := ParseSpeeds("1, 2.5"); err != nil || !slices.Equal(got, []float64{1, 2.5}) || FormatSpeeds(got) != "1,2.5" {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "1,", "0,1", "-1", "fast", "Inf", "NaN", "1e3", "0.00000000001", "99999999999"} {
		if got, err := ParseSpeeds(text); err == nil || !strings.Contains(err.Error(), "--stage-speed") {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

func TestParseObjective(t *testing.T) {
	for _, want := range []Objective{ObjectiveMemory, ObjectiveSpeed} {
		if got, err := ParseObjective(string(want)); got != want || err != nil {
			t.Errorf("%v: %v, %v", want, got, err)
		}
	}
	if _, err := ParseObjective("luck"); err == nil || !strings.Contains(err.Error(), `--pp-objective "luck"`) {
		t.Error(err)
	}
}

func TestHeadroom(t *testing.T) {
	for text, want := range map[string]Headroom{
		"10%": {Percent: 10}, "0%": {}, "2GiB": {Fixed: 2 << 30}, "0": {}, "7.5% + 1MiB": {7.5, 1 << 20}, "1MiB+7.5%": {7.5, 1 << 20},
		DefaultHeadroom().String(): DefaultHeadroom(),
	} {
		if got, err := ParseHeadroom(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "%", "100%", "-1%", "-1GiB", "5%+5%", "1GiB+1GiB", "1GiB+", "half", "1e1%"} {
		if got, err := ParseHeadroom(text); err == nil || !strings.Contains(err.Error(), "--memory-headroom") {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	h := Headroom{Percent: 25, Fixed: 10}
	if got := h.Of(1001, 3); got != 1001-251-30 {
		t.Errorf("of 1001 bytes for 3 stages: %d", got)
	}
	if got := h.Of(20, 2); got > 0 {
		t.Errorf("of 20 bytes for 2 stages: %d", got)
	}
}

// A size that is read is not negative, and reads the same from its bytes.
func FuzzParseSize(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		n, err := ParseSize(text)
		if err != nil {
			return
		}
		if n < 0 || n >= tooMuch {
			t.Fatalf("%q is %d bytes", text, n)
		}
		if again, err := ParseSize(exact(n)); err != nil || again != n {
			t.Fatalf("%q is %d bytes, which reads back as %d, %v", text, n, again, err)
		}
	})
}

func exact(n int64) string { return Headroom{Fixed: n}.String()[len("0%+"):] }

// Lists have a usable value for each stage, or an error.
func FuzzParseLists(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		stages := strings.Count(text, ",") + 1
		if budgets, err := ParseStageMemory(text); err == nil && (len(budgets) != stages || slices.Min(budgets) <= 0) {
			t.Fatalf("memory %q is %v", text, budgets)
		}
		speeds, err := ParseSpeeds(text)
		if err != nil {
			return
		}
		if again, err := ParseSpeeds(FormatSpeeds(speeds)); len(speeds) != stages || slices.Min(speeds) <= 0 || err != nil || !slices.Equal(again, speeds) {
			t.Fatalf("speeds %q are %v, which read back as %v, %v", text, speeds, again, err)
		}
	})
}

// Headroom never adds memory, and reads back from its own text.
func FuzzParseHeadroom(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		h, err := ParseHeadroom(text)
		if err != nil {
			return
		}
		const memory = 1 << 34
		if left := h.Of(memory, 1); left > memory {
			t.Fatalf("%q of %d leaves %d", text, memory, left)
		}
		if again, err := ParseHeadroom(h.String()); err != nil || again != h {
			t.Fatalf("%q is %+v, which reads back as %+v, %v", text, h, again, err)
		}
	})
}
