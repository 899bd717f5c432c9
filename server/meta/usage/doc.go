// Package usage counts what is below directories and what belongs to users and groups, and decides by that what quotas
// still allow. What is counted, and in which rows, is in package schema (Usage).
//
// A metadata service has one [Tree] and its [Quotas] for its shard. They know the catalog, and nothing of sessions,
// layouts, connections and data servers. What a quota has to know of files that are being written the service says when
// it is asked.
//
// # Usage
//
// The batch of a change also changes what directories and owners are charged with ([Change]): at the home of the inode
// and at its owner, never further up. Such a batch makes the home dirty, durably. One worker ([Tree.Run]) has dirty
// directories tell their parents, in passes that are period or more apart. The deepest come first, so that one pass
// takes what is new from the leaves to the root:
//
//	read     the dirty row, then the counters and what was told before
//	commit   the difference is added to the parent, which becomes dirty, and what was told is put. The guards are the
//	         inode row, so that the parent is still this one, and what was told. The dirty row goes as well if it is
//	         what was read
//
// A directory in which somebody works all the time changes its dirty row between the two. It then tells what it has and
// stays dirty. So the worker never waits for those who work there, and they wait for it no longer than for any other
// commit. Its commits are not synced: what a crash takes back is told again. Renaming a directory takes what it has
// told from one parent to the other, and guards it ([Tree.TakeBack]).
//
// With several shards a Tree does this for the directories of its own. Every lookEvery it looks for what the services
// of other shards have told these. So each time that a path goes from one shard to another, news takes that much
// longer.
//
// # Quotas
//
// A call that needs to know quotas reads them if what is known is older than quotaAge. A call that would be refused by
// what is known has all directories tell what they know first, and reads the quotas anew. So what would fit is never
// refused, and near the limit every call does that. What has been admitted is remembered until it is certain to be in
// what is read.
//
//	inodes   are admitted when they are made, get their first name, are moved into a tree, or are given to another
//	         owner. As many may go over as there are calls under way at the same time
//	bytes    are admitted when a file is made longer, and where a layout for writing is granted ([Quotas.Allowance]).
//	         What writers have asked to write counts as if they had reported it. So each file that is being written may
//	         go over by what it was granted and has not come to yet
//
// # Locks
//
// Tree.mu guards the parents of directories. It is held for moments, may be taken with any other mutex held, and
// nothing is locked with it held.
//
// Two tokens are held over calls of the catalog, so no mutex may be held by a caller that waits for one: that of Quotas
// over the reading of quotas, that of Tree over a pass. The token of Tree may be taken with that of Quotas held. The
// functions that [Tree.Quotas] gets are called with the token of Quotas held. They may lock what is the service's, and
// must not ask for quotas or usage.
package usage
