package metarpc

import "fmt"

// Op is what a call asks for.
type Op uint16

const (
	OpRenew Op = iota + 1
	OpEndSession
	OpGetAttr
	OpSetAttr
	OpLookup
	OpCreate
	OpMakeNode
	OpLink
	OpRemove
	OpRename
	OpReadDir
	OpReadLink
	OpGetXattr
	OpSetXattr
	OpListXattr
	OpRemoveXattr
	OpOpen
	OpClose
	OpLayoutGet
	OpLayoutReturn
	OpLayoutCommit
	OpDescribeLayout
	OpDevices
	OpAddDevice
	OpStatFS
	OpStatus
	OpTmpFile
	OpReserve
	OpLock
	OpTestLock
	OpLeaseReturn
	OpReclaimComplete
	OpLayoutError
	OpDrainDevice
	OpRemoveDevice
	OpLayoutStats
	OpLayoutMove
	OpCacheStart
	OpCacheDone
	OpCacheDrop
	OpMetaList
	OpMetaDrain
	OpQuotaSet
	OpQuotas
	OpClientSet
	OpClientList
	OpVerify
	OpReportDevices
	OpParent
	opEnd
)

// BackOp is what a callback asks for.
type BackOp uint16

const (
	BackLayoutRecall BackOp = iota + 1
	BackLeaseRecall
	BackSizeQuery
	BackLockReady
	BackLeaseShrink
	BackCopiesStale
	BackReserveRecall
	BackDeviceStates
	backOpEnd
)

// Ops is one more than the highest Op.
const Ops = int(opEnd)

type opInfo struct {
	name      string
	newArgs   func() any
	newResult func() any
	once      bool
}

func of[T any]() any { return new(T) }

// ops has one row for each Op.
var ops = [opEnd]opInfo{
	OpRenew:          {"RENEW", of[Empty], of[Empty], false},
	OpEndSession:     {"ENDSESSION", of[Empty], of[Empty], false},
	OpGetAttr:        {"GETATTR", of[IDArgs], of[AttrResult], false},
	OpSetAttr:        {"SETATTR", of[SetAttrArgs], of[AttrResult], true},
	OpLookup:         {"LOOKUP", of[NameArgs], of[LookupResult], false},
	OpCreate:         {"CREATE", of[CreateArgs], of[CreateResult], true},
	OpMakeNode:       {"MAKENODE", of[MakeNodeArgs], of[AttrResult], true},
	OpLink:           {"LINK", of[LinkArgs], of[AttrResult], true},
	OpRemove:         {"REMOVE", of[RemoveArgs], of[RemoveResult], true},
	OpRename:         {"RENAME", of[RenameArgs], of[Empty], true},
	OpReadDir:        {"READDIR", of[ReadDirArgs], of[ReadDirResult], false},
	OpReadLink:       {"READLINK", of[IDArgs], of[BytesResult], false},
	OpGetXattr:       {"GETXATTR", of[XattrArgs], of[BytesResult], false},
	OpSetXattr:       {"SETXATTR", of[XattrArgs], of[Empty], true},
	OpListXattr:      {"LISTXATTR", of[IDArgs], of[NamesResult], false},
	OpRemoveXattr:    {"REMOVEXATTR", of[XattrArgs], of[Empty], true},
	OpOpen:           {"OPEN", of[OpenArgs], of[AttrResult], false},
	OpClose:          {"CLOSE", of[CloseArgs], of[Empty], false},
	OpLayoutGet:      {"LAYOUTGET", of[LayoutGetArgs], of[LayoutResult], false},
	OpLayoutReturn:   {"LAYOUTRETURN", of[LayoutReturnArgs], of[Empty], false},
	OpLayoutCommit:   {"LAYOUTCOMMIT", of[LayoutCommitArgs], of[LayoutCommitResult], false},
	OpDescribeLayout: {"DESCRIBELAYOUT", of[IDArgs], of[Described], false},
	OpDevices:        {"DEVICES", of[Empty], of[DevicesResult], false},
	OpAddDevice:      {"ADDDEVICE", of[AddDeviceArgs], of[AddDeviceResult], false},
	OpStatFS:         {"STATFS", of[IDArgs], of[StatFSResult], false},
	OpStatus:         {"STATUS", of[Empty], of[StatusResult], false},
	OpTmpFile:        {"TMPFILE", of[TmpFileArgs], of[CreateResult], true},
	OpReserve:        {"RESERVE", of[ReserveArgs], of[ReserveResult], true},
	OpLock:           {"LOCK", of[LockArgs], of[LockDone], false},
	OpTestLock:       {"TESTLOCK", of[LockArgs], of[LockResult], false},
	OpLeaseReturn:    {"LEASERETURN", of[LeaseReturnArgs], of[Empty], false},

	OpReclaimComplete: {"RECLAIMCOMPLETE", of[Empty], of[Empty], false},
	OpLayoutError:     {"LAYOUTERROR", of[LayoutErrorArgs], of[Empty], false},
	OpDrainDevice:     {"DRAINDEVICE", of[DrainDeviceArgs], of[AddDeviceResult], false},
	OpRemoveDevice:    {"REMOVEDEVICE", of[RemoveDeviceArgs], of[Empty], false},
	OpLayoutStats:     {"LAYOUTSTATS", of[LayoutStatsArgs], of[Empty], false},
	OpLayoutMove:      {"LAYOUTMOVE", of[LayoutMoveArgs], of[LayoutMoveResult], false},
	OpCacheStart:      {"CACHESTART", of[CacheStartArgs], of[CacheStartResult], false},
	OpCacheDone:       {"CACHEDONE", of[CacheDoneArgs], of[Empty], false},
	OpCacheDrop:       {"CACHEDROP", of[CacheDropArgs], of[CacheDropResult], false},
	OpMetaList:        {"METALIST", of[Empty], of[MetaListResult], false},
	OpMetaDrain:       {"METADRAIN", of[MetaDrainArgs], of[MetaListResult], false},
	OpQuotaSet:        {"QUOTASET", of[QuotaSetArgs], of[Empty], false},
	OpQuotas:          {"QUOTAS", of[QuotasArgs], of[QuotasResult], false},
	OpClientSet:       {"CLIENTSET", of[ClientSetArgs], of[Empty], false},
	OpClientList:      {"CLIENTLIST", of[Empty], of[ClientListResult], false},
	OpVerify:          {"VERIFY", of[VerifyArgs], of[VerifyResult], false},
	OpReportDevices:   {"REPORTDEVICES", of[ReportDevicesArgs], of[Empty], false},
	OpParent:          {"PARENT", of[ParentArgs], of[ParentResult], false},
}

// Valid reports whether there is such an op.
func (o Op) Valid() bool { return o > 0 && o < opEnd }

// Once reports whether the answer must survive a crash of the service, because executing the call twice could be seen.
func (o Op) Once() bool { return o.Valid() && ops[o].once }

func (o Op) String() string {
	if !o.Valid() {
		return fmt.Sprintf("op(%d)", uint16(o))
	}
	return ops[o].name
}

// NewArgs returns a pointer to zero arguments of a valid op.
func (o Op) NewArgs() any { return ops[o].newArgs() }

// NewResult returns a pointer to a zero result of a valid op.
func (o Op) NewResult() any { return ops[o].newResult() }

// Valid reports whether there is such a callback.
func (o BackOp) Valid() bool { return o > 0 && o < backOpEnd }

// backOps has one row for each BackOp.
var backOps = [backOpEnd]struct {
	name    string
	newArgs func() any
}{
	BackLayoutRecall: {"LAYOUTRECALL", of[LayoutRecallArgs]},
	BackLeaseRecall:  {"LEASERECALL", of[LeaseRecallArgs]},
	BackSizeQuery:    {"SIZEQUERY", of[SizeQueryArgs]},
	BackLockReady:    {"LOCKREADY", of[LockReadyArgs]},
	BackLeaseShrink:  {"LEASESHRINK", of[LeaseShrinkArgs]},
	BackCopiesStale:  {"COPIESSTALE", of[CopiesStaleArgs]},

	BackReserveRecall: {"RESERVERECALL", of[ReserveRecallArgs]},
	BackDeviceStates:  {"DEVICESTATES", of[DeviceStatesArgs]},
}

func (o BackOp) String() string {
	if !o.Valid() {
		return fmt.Sprintf("callback(%d)", uint16(o))
	}
	return backOps[o].name
}

// NewArgs returns a pointer to zero arguments of a valid callback.
func (o BackOp) NewArgs() any { return backOps[o].newArgs() }
