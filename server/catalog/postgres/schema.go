package postgres

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/weftfs/weft/server/catalog"
)

const (
	comment   = "weft catalog" // what the table's comment begins with
	format    = 1              // the version of what is stored, behind that
	minServer = 140000         // as in server_version_num
)

// The errors that weft_commit raises, so that nothing of the batch is applied. They are SQLSTATEs of a class that
// PostgreSQL leaves to users.
const (
	raiseCareful     = "WF001" // what is returned as careful, found out when something was written already
	raiseNotCounters = "WF002" // a delta on a row that is no counter row
)

// tables makes what holds the rows. $T is the qualified table, $N its name, $S the schema.
const tables = `
CREATE TABLE $T (
	k bytea PRIMARY KEY,
	v bytea NOT NULL,
	since bigint,
	adds bigint,
	maxes bigint
) WITH (fillfactor = 90);
ALTER TABLE $T ALTER v SET STORAGE EXTERNAL;
CREATE TABLE $S.$N_changes (
	k bytea,
	id bigint,
	c bytea NOT NULL,
	PRIMARY KEY (k, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE SEQUENCE $S.$N_ids;
COMMENT ON TABLE $T IS '$REMARK';
`

// The arguments of weft_commit, in order. Arrays of one group have the same length.
const commitArgs = `
	locks bigint[],                                           -- twice the lock's number, and 1 if it is exclusive; in order
	lazy boolean,                                             -- NoSync
	gi int[], gkind int[], gk bytea[], gv bytea[], gl bigint[], -- guards of keys: index, kind, key, value, lock's number
	ri int[], rfrom bytea[], rto bytea[],                     -- guards of ranges: index, from, to
	pk bytea[], pv bytea[],                                   -- puts
	dk bytea[],                                               -- deletes
	ck bytea[], cc bytea[], ca bigint[], cm bigint[], cl bigint[] -- deltas: key, change, fields added to, fields raised, lock's number
`

// What weft_commit returns if not the index of the first guard that does not hold.
const (
	applied = -1
	careful = -2 // nothing is applied: try again by the longer way, see Commit
)

// commitBody is the text of weft_commit.
//
// Each statement sees what was committed before it began (read committed), and so everything that was done under the
// locks by those who had them before.
const commitBody = `
#variable_conflict use_variable
DECLARE
	bad int;
	bad2 int;
	counters boolean;
	n bigint;
	r record;
	s record;
BEGIN
	IF lazy THEN
		PERFORM set_config('synchronous_commit', 'off', true);
	END IF;
	PERFORM CASE WHEN l & 1 = 1 THEN pg_advisory_xact_lock(l >> 1) ELSE pg_advisory_xact_lock_shared(l >> 1) END
		FROM unnest(locks) AS u(l);

	IF cardinality(gi) > 0 THEN
		SELECT min(g.i) FILTER (WHERE CASE g.kind
				WHEN 1 THEN t.k IS NOT NULL
				WHEN 2 THEN t.k IS NULL
				ELSE t.k IS NULL OR t.since IS NULL AND t.v <> g.v END),
			bool_or(g.kind = 3 AND t.since IS NOT NULL)
		INTO bad, counters
		FROM unnest(gi, gkind, gk, gv) AS g(i, kind, k, v) LEFT JOIN $T AS t ON t.k = g.k;
		IF counters THEN
			FOR r IN SELECT g.i, g.k, g.v, g.l FROM unnest(gi, gkind, gk, gv, gl) AS g(i, kind, k, v, l)
				JOIN $T AS t ON t.k = g.k WHERE g.kind = 3 AND t.since IS NOT NULL
			LOOP
				IF NOT pg_try_advisory_xact_lock(r.l) THEN
					RETURN -2;
				END IF;
				SELECT t.v, EXISTS (SELECT FROM $C AS c WHERE c.k = t.k AND c.id > t.since) AS pending INTO s
					FROM $T AS t WHERE t.k = r.k;
				IF s.pending THEN
					RETURN -2;
				END IF;
				IF s.v <> r.v THEN
					bad := least(bad, r.i);
				END IF;
			END LOOP;
		END IF;
	END IF;
	IF cardinality(ri) > 0 THEN
		SELECT min(g.i) INTO bad2 FROM unnest(ri, rfrom, rto) AS g(i, f, e)
			WHERE (SELECT t.k FROM $T AS t WHERE t.k >= g.f AND t.k < g.e ORDER BY t.k LIMIT 1) IS NOT NULL;
		bad := least(bad, bad2);
	END IF;
	IF bad IS NOT NULL OR cardinality(pk) + cardinality(dk) + cardinality(ck) = 0 THEN
		IF NOT lazy THEN -- something for the commit to wait for, which comes behind all that could be seen
			PERFORM pg_logical_emit_message(true, 'weft', '');
		END IF;
		RETURN coalesce(bad, -1); -- applied
	END IF;

	IF cardinality(pk) > 0 THEN
		INSERT INTO $T AS t (k, v) SELECT p.k, p.v FROM unnest(pk, pv) AS p(k, v)
			ON CONFLICT ON CONSTRAINT $N_pkey DO UPDATE SET v = excluded.v, since = NULL, adds = NULL, maxes = NULL;
	END IF;
	IF cardinality(dk) > 0 THEN
		DELETE FROM $T AS t WHERE t.k = ANY (dk);
	END IF;
	IF cardinality(ck) > 0 THEN
		INSERT INTO $C (k, id, c) SELECT d.k, nextval('$I'), d.c
			FROM unnest(ck, cc, ca, cm) AS d(k, c, a, m) JOIN $T AS t ON t.k = d.k
			WHERE t.since IS NOT NULL AND t.adds & d.a = d.a AND t.maxes & d.m = d.m;
		GET DIAGNOSTICS n = ROW_COUNT;
		IF n < cardinality(ck) THEN
			FOR r IN SELECT d.k, d.c, d.a, d.m, d.l FROM unnest(ck, cc, ca, cm, cl) AS d(k, c, a, m, l) LEFT JOIN $T AS t ON t.k = d.k
				WHERE (t.since IS NOT NULL AND t.adds & d.a = d.a AND t.maxes & d.m = d.m) IS NOT TRUE
			LOOP
				IF NOT pg_try_advisory_xact_lock(r.l) THEN
					RAISE EXCEPTION USING ERRCODE = 'WF001', MESSAGE = 'weft: a row that becomes counters is in use';
				END IF;
				SELECT t.since, length(t.v) AS len INTO s FROM $T AS t WHERE t.k = r.k;
				IF NOT FOUND THEN
					INSERT INTO $T (k, v, since, adds, maxes) VALUES (r.k, '', nextval('$I'), r.a & ~r.m, r.m & ~r.a);
				ELSIF s.since IS NULL THEN
					IF s.len % 8 <> 0 OR s.len > $MAXLEN THEN
						RAISE EXCEPTION USING ERRCODE = 'WF002', MESSAGE = 'weft: delta on a row that is no counter row',
							DETAIL = encode(r.k, 'escape');
					END IF;
					UPDATE $T AS t SET since = nextval('$I'), adds = r.a & ~r.m, maxes = r.m & ~r.a WHERE t.k = r.k;
				ELSE
					UPDATE $T AS t SET adds = (t.adds | r.a) & ~r.m, maxes = (t.maxes | r.m) & ~r.a WHERE t.k = r.k;
				END IF;
				INSERT INTO $C (k, id, c) VALUES (r.k, nextval('$I'), r.c);
			END LOOP;
		END IF;
	END IF;
	RETURN -1;
END`

// The columns of a row as they are read: value, and if it is a counter row the changes that are not in there yet.
const rowColumns = `t.v, CASE WHEN t.since IS NOT NULL THEN
	ARRAY(SELECT c.c FROM $C AS c WHERE c.k = t.k AND c.id > t.since ORDER BY c.id) END`

// statements are the texts of what is sent to the server.
type statements struct {
	commit  string // calls the function
	get     string // key: its columns
	getMany string // keys: position from 1, columns
	scan    [2]map[bool]string

	lock     string // lock's numbers as in commitArgs
	try      string // two lock's numbers: the first shared and the second alone, unless somebody has them
	setValue string // key, value: the changes there are do not count any more
	cut      string // key: deletes its changes
	takeOut  string // key: deletes the changes that count, and returns them in order
	putBack  string // key, id, change
	garbage  string // key: deletes the changes that do not count
	changed  string // key: keys behind it that have changes
}

// names are the qualified names of what belongs to a catalog.
type names struct {
	schema, table string // the latter without schema
	replace       *strings.Replacer
	function      string // qualified, with a name that follows from its text
}

func namesOf(schema, table string) *names {
	quoted := pgx.Identifier{schema}.Sanitize()
	n := &names{schema: schema, table: table}
	n.replace = strings.NewReplacer(
		"$T", quoted+"."+table, "$C", quoted+"."+table+"_changes", "$I", strings.ReplaceAll(quoted, "'", "''")+"."+table+"_ids",
		"$S", quoted, "$N", table, "$MAXLEN", fmt.Sprint(8*catalog.MaxFields), "$REMARK", fmt.Sprintf("%s %d", comment, format),
	)
	// Programs of different versions can use one catalog at the same time: each finds the function it knows.
	sum := sha256.Sum256([]byte(commitArgs + commitBody))
	n.function = fmt.Sprintf("%s.%s_commit_%x", quoted, table, sum[:6])
	return n
}

// salt keeps the locks of catalogs in one database apart.
func (n *names) salt() uint64 {
	return hash(hash(fnvOffset, []byte(n.schema+"\x00")), []byte(n.table+"\x00"))
}

func (n *names) sql(text string) string { return n.replace.Replace(text) }

// createFunction is the statement that makes weft_commit.
func (n *names) createFunction() string {
	return fmt.Sprintf("CREATE FUNCTION %s(%s) RETURNS int LANGUAGE plpgsql AS $weft$%s$weft$", n.function, commitArgs, n.sql(commitBody))
}

func (n *names) statements() *statements {
	s := &statements{
		commit:  "SELECT " + n.function + "($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13,$14,$15,$16,$17,$18)",
		get:     n.sql("SELECT " + rowColumns + " FROM $T AS t WHERE t.k = $1"),
		getMany: n.sql("SELECT q.i, " + rowColumns + " FROM unnest($1::bytea[]) WITH ORDINALITY AS q(k, i) JOIN $T AS t ON t.k = q.k"),
		lock: `SELECT count(*) FROM (SELECT CASE WHEN l & 1 = 1 THEN pg_advisory_xact_lock(l >> 1)
			ELSE pg_advisory_xact_lock_shared(l >> 1) END FROM unnest($1::bigint[]) AS u(l)) AS done`,
		try:      "SELECT pg_try_advisory_xact_lock_shared($1) AND pg_try_advisory_xact_lock($2)",
		setValue: n.sql("UPDATE $T SET v = $2, since = nextval('$I') WHERE k = $1"),
		cut:      n.sql("DELETE FROM $C WHERE k = $1"),
		takeOut: n.sql(`WITH gone AS (DELETE FROM $C AS c USING $T AS t WHERE t.k = $1 AND c.k = t.k AND c.id > t.since RETURNING c.id, c.c)
			SELECT id, c FROM gone ORDER BY id`),
		putBack: n.sql("INSERT INTO $C (k, id, c) VALUES ($1, $2, $3)"),
		garbage: n.sql(`DELETE FROM $C AS c WHERE c.k = $1
			AND NOT EXISTS (SELECT FROM $T AS t WHERE t.k = c.k AND t.since < c.id)`),
		changed: n.sql("SELECT DISTINCT c.k FROM $C AS c WHERE c.k > $1 ORDER BY c.k LIMIT 1000"),
	}
	for reverse, order := range []string{"", " DESC"} {
		s.scan[reverse] = map[bool]string{
			true:  n.sql("SELECT t.k FROM $T AS t WHERE t.k >= $1 AND t.k < $2 ORDER BY t.k" + order + " LIMIT $3"),
			false: n.sql("SELECT t.k, " + rowColumns + " FROM $T AS t WHERE t.k >= $1 AND t.k < $2 ORDER BY t.k" + order + " LIMIT $3"),
		}
	}
	return s
}

// install looks at the server, and makes or checks the catalog.
func install(ctx context.Context, conn *pgx.Conn, p *place, mustExist bool, log *slog.Logger) (*names, error) {
	var version int
	var versionText, user string
	var schema *string
	var fsync bool
	err := conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('server_version'),
		current_user::text, current_schema()::text, current_setting('fsync')::boolean`).Scan(&version, &versionText, &user, &schema, &fsync)
	if err != nil {
		return nil, err
	}
	if version < minServer {
		return nil, fmt.Errorf("the server is PostgreSQL %s, weft needs %d or newer", versionText, minServer/10000)
	}
	if schema == nil {
		return nil, errors.New("no schema of the search_path exists: make one (CREATE SCHEMA), or name another with ?search_path=")
	}
	n := namesOf(*schema, p.table)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // after a commit it does nothing
	// Two that open at once make the catalog one after the other.
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(n.salt())); err != nil {
		return nil, err
	}
	var there bool
	var remark *string
	if err := tx.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL, obj_description(to_regclass($1), 'pg_class')", n.sql("$T")).
		Scan(&there, &remark); err != nil {
		return nil, err
	}
	switch {
	case !there && mustExist:
		return nil, fmt.Errorf("%w: there is no table %s", catalog.ErrNoCatalog, n.sql("$T"))
	case !there:
		if _, err := tx.Exec(ctx, n.sql(tables)); err != nil {
			return nil, fmt.Errorf("make the tables in schema %s: %w", n.sql("$S"), err)
		}
	case remark == nil || !strings.HasPrefix(*remark, comment+" "):
		return nil, fmt.Errorf("%w: table %s is not weft's; choose another name with ?weft_table=", catalog.ErrNotCatalog, n.sql("$T"))
	case *remark != fmt.Sprintf("%s %d", comment, format):
		return nil, fmt.Errorf("table %s is a %q, this program knows %q: use the program version that made it, or a newer one",
			n.sql("$T"), *remark, fmt.Sprintf("%s %d", comment, format))
	}
	if err := tx.QueryRow(ctx, "SELECT to_regproc($1) IS NOT NULL", n.function).Scan(&there); err != nil {
		return nil, err
	}
	if !there {
		if _, err := tx.Exec(ctx, n.createFunction()); err != nil {
			return nil, fmt.Errorf("make the function %s: %w", n.function, err)
		}
	}
	var allowed bool
	err = tx.QueryRow(ctx, `SELECT has_function_privilege(to_regproc($3)::oid, 'EXECUTE') AND has_sequence_privilege($4, 'USAGE') AND
		(SELECT bool_and(has_table_privilege(t, p)) FROM unnest(ARRAY[$1, $2]) AS t, unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS p)`,
		n.sql("$T"), n.sql("$C"), n.function, n.sql("$S.$N_ids")).Scan(&allowed)
	if err != nil {
		return nil, err
	}
	if !allowed {
		return nil, fmt.Errorf("user %s may not use the catalog: as the owner of table %s run GRANT SELECT, INSERT, UPDATE, DELETE ON %s, %s TO %[1]s, "+
			"GRANT USAGE ON SEQUENCE %[5]s TO %[1]s, and GRANT EXECUTE ON FUNCTION %[6]s TO %[1]s",
			pgx.Identifier{user}.Sanitize(), n.sql("$T"), n.sql("$T"), n.sql("$C"), n.sql("$S.$N_ids"), n.function)
	}
	if !fsync {
		log.Warn("the PostgreSQL server runs with fsync=off: what weft acknowledges does not survive the server's machine", "catalog", p.shown)
	}
	return n, tx.Commit(ctx)
}
