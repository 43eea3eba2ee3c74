package pipeline

import (
	"context"
	"testing"
)

// What follows lets the tests of package pipeline_test, which may import the links, run the tests of this package over
// them.

// overLinks starts a pipeline whose stages are reached over links; nil starts it in this process.
var overLinks func(context.Context, Config) (*Pipeline, error)

// OverLinks has all pipelines of a test start by start. The Port of each of their RemoteStages is a PortTo.
func OverLinks(t *testing.T, start func(context.Context, Config) (*Pipeline, error)) {
	overLinks = start
	t.Cleanup(func() { overLinks = nil })
}

// PortTo is a port with the stage that it leads to.
type PortTo struct {
	StagePort
	Stage *Stage
}

// Anywhere are the tests that hold wherever the stages run.
var Anywhere = map[string]func(*testing.T){
	"batch equals solo":             TestBatchEqualsSolo,
	"concurrent callers equal solo": TestConcurrentCallersEqualSolo,
	"executor death":                TestExecutorDeath,
	"death fails everything":        TestDeathFailsEverythingInFlight,
	"death while idle":              TestDeathWhileIdle,
	"broken connection":             TestBrokenConnection,
	"end without error":             TestEndWithoutError,
	"failed micro-batch":            TestFailedMicroBatchCostsOnlyItsOwn,
	"refused reservation":           TestRefusedReservationIsRolledBack,
	"cancel":                        TestCancelReachesEveryStage,
	"ended context":                 TestCallsOnAnEndedContext,
	"share and rewind":              TestShareAndRewind,
	"failed rewind":                 TestFailedRewindReleases,
	"failed share":                  TestFailedShareIsRolledBack,
	"wrong calls":                   TestWrongCallsAreRefused,
	"pieces of a prompt":            TestPiecesFollowEachOther,
	"a failed piece":                TestFailedPieceEndsThoseAfterIt,
	"orders between pieces":         TestPiecesKeepOtherOrdersOut,
	"logits":                        TestLogitsAreTheCallers,
	"wrong answers":                 TestWrongAnswersAreCaught,
	"close":                         TestCloseEndsWhatIsInFlight,
	"chaos":                         TestChaos,
	"overlap":                       TestStagesOverlap,
	"frozen executor":               TestFrozenExecutorIsLost,
	"frozen under load":             TestFrozenExecutorFreesItsCallers,
	"frozen at operations":          TestFrozenExecutorFreesOperations,
	"close while frozen":            TestCloseFreesWhoIsInSend,
	"masks":                         TestMasksReachThePlaceThatAnswers,
	"wrong masks":                   TestMaskOfAnotherLengthIsRefused,
	"busy":                          TestBusyCountsComputing,
}

// What the tests over links use beside.
type ToyLauncher = toyLauncher

var (
	ToyConfig  = toyConfig
	WholeLife  = wholeLife
	Transcript = transcript
	Spin       = spin
)
