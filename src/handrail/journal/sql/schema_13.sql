CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, principal TEXT NOT NULL, status TEXT NOT NULL,
        owner TEXT NOT NULL, leased_until REAL NOT NULL, began_at REAL NOT NULL, changed_at REAL NOT NULL,
        stopping INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0, progress INTEGER NOT NULL DEFAULT 0,
        queue TEXT NOT NULL DEFAULT '', host TEXT NOT NULL DEFAULT '', key TEXT NOT NULL DEFAULT '', due_at REAL,
        legs INTEGER NOT NULL DEFAULT 0,
        record BLOB NOT NULL, outcome BLOB NOT NULL, mac BLOB NOT NULL
    );
CREATE INDEX runs_by_time ON runs (began_at);
CREATE INDEX runs_of_a_session ON runs (session_id, began_at);
CREATE INDEX runs_of_a_principal ON runs (principal, began_at);
CREATE INDEX sessions_of_a_principal ON runs (principal, session_id, began_at, changed_at);
CREATE INDEX runs_for_workers ON runs (coalesce(due_at, 0), began_at, id) WHERE queue != ''
        AND status IN ('queued', 'running', 'parked') AND (due_at IS NOT NULL OR status != 'parked');
CREATE UNIQUE INDEX one_turn_of_a_session ON runs (session_id)
        WHERE queue != '' AND owner != '' AND status IN ('queued', 'running', 'parked');
CREATE UNIQUE INDEX runs_by_key ON runs (principal, key) WHERE key != '';
CREATE TABLE workers (
        owner TEXT PRIMARY KEY, host TEXT NOT NULL, leased_until REAL NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL
    );
CREATE TABLE records (
        number INTEGER PRIMARY KEY, chain TEXT NOT NULL, link INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
        at REAL NOT NULL, session_id TEXT NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL, state TEXT NOT NULL,
        opens INTEGER NOT NULL, UNIQUE (chain, link)
    );
CREATE INDEX undone_calls ON records (chain, key) WHERE kind IN ('undone', 'told');
CREATE INDEX chains_of_a_session ON records (session_id) WHERE opens = 1;
CREATE INDEX units_to_apply ON records (chain, key) WHERE state = 'committed';
CREATE TABLE chains (
        number INTEGER PRIMARY KEY, chain TEXT NOT NULL UNIQUE, links INTEGER NOT NULL, seal BLOB NOT NULL
    );
CREATE TABLE questions (
        id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB, answered_at REAL, run_id TEXT NOT NULL,
        asked_at REAL NOT NULL, principal TEXT NOT NULL
    );
CREATE INDEX questions_of_a_run ON questions (run_id);
CREATE INDEX open_questions ON questions (asked_at) WHERE answer IS NULL;
CREATE INDEX open_questions_to_a_principal ON questions (principal, asked_at) WHERE answer IS NULL;
CREATE TABLE tickets (
        run_id TEXT NOT NULL, place TEXT NOT NULL, text TEXT NOT NULL, open INTEGER NOT NULL,
        holder TEXT NOT NULL, held_until REAL NOT NULL, deposit BLOB NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (run_id, place)
    );
CREATE TABLE blobs (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE blob_runs (run_id TEXT, digest TEXT, PRIMARY KEY (run_id, digest)) WITHOUT ROWID;
CREATE INDEX runs_of_a_blob ON blob_runs (digest);
CREATE TABLE workspaces (
        name TEXT PRIMARY KEY, id TEXT NOT NULL, version INTEGER NOT NULL, run_id TEXT NOT NULL, owner TEXT NOT NULL,
        seal TEXT NOT NULL, mac BLOB NOT NULL
    );
CREATE TABLE workspace_files (
        workspace TEXT NOT NULL, path TEXT NOT NULL, version INTEGER NOT NULL, kind TEXT NOT NULL,
        mode INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (workspace, path)
    );
CREATE INDEX workspace_files_by_version ON workspace_files (workspace, version);
CREATE INDEX workspace_files_of_a_blob ON workspace_files (digest);
