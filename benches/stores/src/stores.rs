//! The stores: each takes a group of events and returns when it is durable.

use coevolve::event::{FailureNoted, Meta, RunStarted};
use coevolve::log::{EventStore, Log, Options, Ticket};
use std::collections::VecDeque;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// What goes wrong in a store; the benchmark ends with it.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A store that can be appended to.
pub trait Store {
    /// Appends a group of events that follow those before. `first` numbers the first one. On return they are durable,
    /// but for a store with an `acknowledge` of its own.
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()>;

    /// Waits until everything appended is durable; how long each of the groups of this turn took.
    fn acknowledge(&mut self) -> Result<Option<Vec<Duration>>> {
        Ok(None)
    }

    /// Waits until work left for later is done, so that it does not slow the next store.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What makes a store in an empty folder.
pub type Open = fn(&Path) -> Result<Box<dyn Store>>;

/// Name, how it makes a commit durable, and how it is opened.
pub const STORES: &[(&str, &str, Open)] = &[
    ("raw file", "write, fdatasync", RawFile::open),
    ("coevolve", "one record, fdatasync; no sled copy", |dir| Coevolve::open(dir, false, IN_FLIGHT)),
    ("coevolve, one by one", "the same", |dir| Coevolve::open(dir, false, 1)),
    ("coevolve + sled", "the same, and the sled copy filled behind", |dir| Coevolve::open(dir, true, IN_FLIGHT)),
    ("fjall", "batch, PersistMode::SyncData", Fjall::open),
    ("LMDB", "transaction, default flags", Lmdb::open),
    ("SQLite", "WAL, synchronous=FULL", Sqlite::open),
    ("redb", "transaction, Durability::Immediate", Redb::open),
    ("sled", "batch, flush, fdatasync of its file", Sled::open),
];

struct RawFile(File);

impl RawFile {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        Ok(Box::new(RawFile(File::create(dir.join("raw"))?)))
    }
}

impl Store for RawFile {
    fn commit(&mut self, _: u64, group: &[Vec<u8>]) -> Result<()> {
        self.0.write_all(&group.concat())?;
        Ok(self.0.sync_data()?)
    }
}

/// The log, with so many groups on their way: a group is begun while those before it are being flushed.
struct Coevolve {
    log: Log,
    in_flight: usize,
    /// Begin and last ticket of the groups on their way.
    waiting: VecDeque<(Instant, Ticket)>,
    took: Vec<Duration>,
}

/// Groups on their way: one that is flushed, some that wait, one that is framed.
const IN_FLIGHT: usize = 4;

/// A frame of 1,024 bytes has 72 of header and 32 of meta; the rest is the payload's archive.
const MESSAGE: usize = 1024 - 72 - 32 - 16;

impl Coevolve {
    fn open(dir: &Path, sled: bool, in_flight: usize) -> Result<Box<dyn Store>> {
        let started = RunStarted {
            run_id: "00112233445566778899aabbccddeeff".into(),
            seed: 1,
            settings: "{}".into(),
            code_version: "bench".into(),
            policy_digest: String::new(),
            environment: "none".into(),
        };
        // The wait of `coevolve train`: a commit is closed by its 256 events, not by the clock.
        let options = Options { sled, group_wait_us: 5_000, ..Options::default() };
        let log = Log::create(&dir.join("run"), started, Meta::default(), options)?;
        Ok(Box::new(Coevolve { log, in_flight, waiting: VecDeque::new(), took: Vec::new() }))
    }

    /// Waits until fewer than so many groups are on their way.
    fn wait(&mut self, below: usize) -> Result<()> {
        while self.waiting.len() >= below.max(1) {
            let Some((begin, last)) = self.waiting.pop_front() else { break };
            last.wait()?;
            self.took.push(begin.elapsed());
        }
        Ok(())
    }
}

impl Store for Coevolve {
    fn commit(&mut self, _: u64, group: &[Vec<u8>]) -> Result<()> {
        let begin = Instant::now();
        let mut last = None;
        // Serialising, checksums and hashes are part of it; making the event's text is not the log's work.
        for event in group {
            let message = String::from_utf8(event[..MESSAGE].to_vec())?;
            last = Some(self.log.append(FailureNoted { stage: String::new(), message }.into(), Meta::default())?);
        }
        self.waiting.extend(last.map(|ticket| (begin, ticket)));
        self.wait(self.in_flight)
    }

    fn acknowledge(&mut self) -> Result<Option<Vec<Duration>>> {
        self.log.barrier()?;
        self.wait(1)?;
        Ok(Some(std::mem::take(&mut self.took)))
    }

    fn settle(&mut self) -> Result<()> {
        while let Some(status) = self.log.sled_status() {
            if let Some(failed) = status.failed {
                return Err(failed.into());
            }
            if status.events >= self.log.head() {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

struct Fjall {
    db: fjall::Database,
    events: fjall::Keyspace,
}

impl Fjall {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        let db = fjall::Database::builder(dir.join("fjall")).open()?;
        let events = db.keyspace("events", fjall::KeyspaceCreateOptions::default)?;
        Ok(Box::new(Fjall { db, events }))
    }
}

impl Store for Fjall {
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()> {
        let mut batch = self.db.batch().durability(Some(fjall::PersistMode::SyncData));
        for (key, event) in (first..).zip(group) {
            batch.insert(&self.events, key.to_be_bytes(), event.as_slice());
        }
        Ok(batch.commit()?)
    }
}

struct Lmdb {
    env: heed::Env,
    events: heed::Database<heed::types::Bytes, heed::types::Bytes>,
}

impl Lmdb {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        // SAFETY: the folder is this process's own, and nothing else opens or changes the map's file.
        let env = unsafe { heed::EnvOpenOptions::new().map_size(64 << 30).open(dir)? };
        let mut txn = env.write_txn()?;
        let events = env.create_database(&mut txn, None)?;
        txn.commit()?;
        Ok(Box::new(Lmdb { env, events }))
    }
}

impl Store for Lmdb {
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()> {
        let mut txn = self.env.write_txn()?;
        for (key, event) in (first..).zip(group) {
            self.events.put_with_flags(&mut txn, heed::PutFlags::APPEND, &key.to_be_bytes(), event)?;
        }
        Ok(txn.commit()?)
    }
}

struct Sqlite(rusqlite::Connection);

impl Sqlite {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        let db = rusqlite::Connection::open(dir.join("events.sqlite"))?;
        db.pragma_update(None, "journal_mode", "wal")?;
        db.pragma_update(None, "synchronous", "full")?;
        db.execute_batch("create table events (seq integer primary key, frame blob not null)")?;
        Ok(Box::new(Sqlite(db)))
    }
}

impl Store for Sqlite {
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()> {
        let txn = self.0.transaction()?;
        {
            let mut insert = txn.prepare_cached("insert into events values (?, ?)")?;
            for (key, event) in (first..).zip(group) {
                insert.execute(rusqlite::params![key as i64, event])?;
            }
        }
        Ok(txn.commit()?)
    }
}

struct Redb(redb::Database);

const REDB_EVENTS: redb::TableDefinition<u64, &[u8]> = redb::TableDefinition::new("events");

impl Redb {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        Ok(Box::new(Redb(redb::Database::create(dir.join("events.redb"))?)))
    }
}

impl Store for Redb {
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()> {
        let mut txn = self.0.begin_write()?;
        txn.set_durability(redb::Durability::Immediate)?;
        {
            let mut table = txn.open_table(REDB_EVENTS)?;
            for (key, event) in (first..).zip(group) {
                table.insert(key, event.as_slice())?;
            }
        }
        Ok(txn.commit()?)
    }
}

struct Sled {
    db: sled::Db,
    /// Its log file: sled's own flush does not sync it.
    file: File,
}

impl Sled {
    fn open(dir: &Path) -> Result<Box<dyn Store>> {
        let db = sled::Config::new().path(dir.join("sled")).flush_every_ms(None).open()?;
        let file = File::options().read(true).write(true).open(dir.join("sled/db"))?;
        Ok(Box::new(Sled { db, file }))
    }
}

impl Store for Sled {
    fn commit(&mut self, first: u64, group: &[Vec<u8>]) -> Result<()> {
        let mut batch = sled::Batch::default();
        for (key, event) in (first..).zip(group) {
            batch.insert(&key.to_be_bytes(), event.as_slice());
        }
        self.db.apply_batch(batch)?;
        self.db.flush()?;
        Ok(self.file.sync_data()?)
    }
}
