package partition

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

const layersFlag = "--pp-layers"

// ParseRanges reads the value of --pp-layers: inclusive layer ranges, one per stage, e.g. "0-14,15-29". It checks
// what can be seen without a model: numbers, order, gaps and overlaps. All faults are returned together.
func ParseRanges(value string) ([]sdk.LayerRange, error) {
	if strings.TrimSpace(value) == "" {
		return nil, layersFault(value, `blank: give one inclusive range per stage, e.g. "0-14,15-29", or leave the flag out`)
	}
	var ranges []sdk.LayerRange
	var faults []error
	for i, part := range strings.Split(value, ",") {
		r, reason := parseRange(i, part)
		if reason != "" {
			faults = append(faults, layersFault(value, reason))
			continue
		}
		ranges = append(ranges, r)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	if faults := checkOrder(value, ranges); len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return ranges, nil
}

// parseRange reads "a-b", or "a" for a single layer, and returns what is wrong with it, if anything.
func parseRange(stage int, part string) (r sdk.LayerRange, reason string) {
	part = strings.TrimSpace(part)
	if part == "" {
		return r, fmt.Sprintf("the range of stage %d is blank: remove the extra comma or give its layers", stage)
	}
	from, to, isRange := strings.Cut(part, "-")
	if !isRange {
		to = from
	}
	first, err1 := parseLayer(from)
	last, err2 := parseLayer(to)
	if err1 != nil || err2 != nil {
		return r, fmt.Sprintf("%q of stage %d is no range of layer numbers: write first-last, e.g. 0-14", part, stage)
	}
	if first > last {
		return r, fmt.Sprintf("%q of stage %d is reversed: write %d-%d", part, stage, last, first)
	}
	return sdk.LayerRange{Start: first, End: last + 1}, ""
}

func parseLayer(s string) (int, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 31)
	return int(n), err
}

// checkOrder finds the gaps and overlaps between neighbours, and a start other than layer 0.
func checkOrder(value string, ranges []sdk.LayerRange) (faults []error) {
	next := 0
	for i, r := range ranges {
		switch {
		case i == 0 && r.Start != 0:
			faults = append(faults, layersFault(value, fmt.Sprintf("stage 0 starts at layer %d: start it at layer 0", r.Start)))
		case r.Start > next:
			faults = append(faults, layersFault(value, fmt.Sprintf("%s between stage %d and stage %d on no stage: start stage %d at layer %d", missing(next, r.Start), i-1, i, i, next)))
		case r.Start < next:
			faults = append(faults, layersFault(value, fmt.Sprintf("stage %d starts at layer %d, but stage %d ends at layer %d, so they overlap: start stage %d at layer %d", i, r.Start, i-1, next-1, i, next)))
		}
		next = r.End
	}
	return faults
}

// missing names the layers [from, to), with the verb that fits.
func missing(from, to int) string {
	if to-from == 1 {
		return fmt.Sprintf("layer %d is", from)
	}
	return fmt.Sprintf("layers %d-%d are", from, to-1)
}

// checkRanges returns all faults together: ranges must cover every layer once, in order, and cut no adjacency group.
func checkRanges(profile *sdk.ModelProfile, ranges []sdk.LayerRange) (faults []error) {
	value := FormatRanges(ranges)
	n := len(profile.Layers)
	if len(ranges) == 0 {
		return []error{layersFault(value, "no stages: give one inclusive range per stage")}
	}
	for i, r := range ranges {
		if r.Start >= r.End {
			faults = append(faults, layersFault(value, fmt.Sprintf("stage %d has no layers", i)))
		}
	}
	faults = append(faults, checkOrder(value, ranges)...)
	switch end := ranges[len(ranges)-1].End; {
	case end > n:
		faults = append(faults, layersFault(value, fmt.Sprintf("layer %d is out of range: the model has layers 0-%d", end-1, n-1)))
	case end < n:
		faults = append(faults, layersFault(value, fmt.Sprintf("%s on no stage: end the last stage at layer %d", missing(end, n), n-1)))
	}
	return append(faults, checkAdjacency(profile, ranges)...)
}

// checkAdjacency names every group that a boundary cuts, not only the first.
func checkAdjacency(profile *sdk.ModelProfile, ranges []sdk.LayerRange) (faults []error) {
	legal := legalCuts(profile)
	for _, r := range ranges[1:] {
		for _, g := range profile.Adjacency {
			if g.Source < r.Start && r.Start <= g.Consumer {
				before, after := nearest(legal, r.Start)
				faults = append(faults, &AdjacencyError{Group: g, Cut: r.Start, Before: before, After: after})
			}
		}
	}
	return faults
}

// nearest returns the legal cuts on both sides of one that is not, 0 where there is none.
func nearest(legal []bool, cut int) (before, after int) {
	for i := min(cut, len(legal)-1) - 1; i > 0 && before == 0; i-- {
		if legal[i] {
			before = i
		}
	}
	for i := cut + 1; i < len(legal)-1 && after == 0; i++ {
		if legal[i] {
			after = i
		}
	}
	return before, after
}

// FormatRanges writes ranges as --pp-layers takes them.
func FormatRanges(ranges []sdk.LayerRange) string {
	var b strings.Builder
	for i, r := range ranges {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%d-%d", r.Start, r.End-1)
	}
	return b.String()
}

func layersFault(value, reason string) error {
	return &FlagError{Flag: layersFlag, Value: value, Reason: reason}
}
