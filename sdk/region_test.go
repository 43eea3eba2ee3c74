package sdk

import (
	"os"
	"strings"
	"testing"
)

func TestRegionIsShared(t *testing.T) {
	host, err := NewRegion()
	if err != nil {
		t.Fatal(err)
	}
	other, err := host.duplicate()
	if err != nil {
		t.Fatal(err)
	}
	layout := RegionLayout{Slots: 3, InBytes: 5, OutBytes: 7}
	if err := host.Map(layout); err != nil {
		t.Fatal(err)
	}
	if err := other.attach(layout); err != nil {
		t.Fatal(err)
	}
	for i := range layout.Slots {
		copy(host.In(i), "hello")
		copy(other.Out(i), "goodbye")
	}
	for i := range layout.Slots {
		if got := string(other.In(i)) + " " + string(host.Out(i)); got != "hello goodbye" {
			t.Errorf("slot %d holds %q", i, got)
		}
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if err := host.Close(); err != nil {
		t.Error(err)
	}
}

// TestRegionSurvivesARemap maps a smaller layout while the other side still has the larger one.
func TestRegionSurvivesARemap(t *testing.T) {
	host, err := NewRegion()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	other, err := host.duplicate()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	large := RegionLayout{Slots: 1, InBytes: 1 << 20}
	if err := host.Map(large); err != nil {
		t.Fatal(err)
	}
	if err := other.attach(large); err != nil {
		t.Fatal(err)
	}
	if err := host.Map(RegionLayout{Slots: 1, InBytes: 16}); err != nil {
		t.Fatal(err)
	}
	other.In(0)[1<<20-1] = 1 // would be a bus error
	if n := len(host.In(0)); n != 16 {
		t.Errorf("the host's slot has %d bytes, want 16", n)
	}
}

func TestRegionErrors(t *testing.T) {
	r, err := NewRegion()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for name, c := range map[string]struct {
		layout RegionLayout
		want   string
	}{
		"no slots":        {RegionLayout{InBytes: 1}, "at least one slot"},
		"a negative area": {RegionLayout{Slots: 1, OutBytes: -1}, "negative area"},
		"an overflow":     {RegionLayout{Slots: 1 << 40, InBytes: 1 << 40}, "overflows"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := r.Map(c.layout); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
		})
	}
	if err := r.attach(RegionLayout{Slots: 1, InBytes: 64}); err == nil || !strings.Contains(err.Error(), "has 0 bytes") {
		t.Errorf("error %v, want one about the size", err)
	}
}

// TestRegionHasNoName looks for what a killed host would leave behind.
func TestRegionHasNoName(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r, err := NewRegion()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	left, err := os.ReadDir(os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 0 {
		t.Errorf("the region left %v", left)
	}
}
