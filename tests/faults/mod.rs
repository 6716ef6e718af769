//! Watching and failing a process's file system calls (`preload.c`), and what a power loss may leave of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the library that is preloaded; the C compiler is the one that building this program needs anyway.
pub fn library() -> &'static Path {
    // Once for all tests of a process: they run side by side.
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/preload.c");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("preload-{}.so", std::process::id()));
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let mut command = Command::new(cc);
        command.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&target).args([source, "-ldl", "-lpthread"]);
        let done = command.output().expect("a C compiler");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        target
    })
}

/// One recorded call, with paths below the root.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    Create(String),
    Truncate(String, u64),
    Write(String, u64, Vec<u8>),
    Flush(String),
    FlushFolder(String),
    Rename(String, String),
    Link(String, String),
    Unlink(String),
    MakeFolder(String),
    RemoveFolder(String),
}

/// Reads a trace: the calls, and whether each was made to fail or failed.
pub fn trace(path: &Path) -> Vec<(Op, bool)> {
    let bytes = std::fs::read(path).expect("trace");
    let mut rest = bytes.as_slice();
    let mut take = |n: usize| {
        let (head, tail) = rest.split_at_checked(n)?;
        rest = tail;
        Some(head.to_vec())
    };
    let mut ops = Vec::new();
    while let Some(head) = take(18) {
        let short = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]) as usize;
        let offset = u64::from_le_bytes(head[6..14].try_into().expect("8 bytes"));
        let len = u32::from_le_bytes(head[14..18].try_into().expect("4 bytes")) as usize;
        let (lp, ls) = (short(2), short(4));
        // A killed process leaves a torn last record.
        let (Some(path), Some(second), Some(data)) = (take(lp), take(ls), take(len)) else { break };
        let text = |b: Vec<u8>| String::from_utf8(b).expect("UTF-8 path");
        let (path, second) = (text(path), text(second));
        let op = match head[0] {
            b'C' => Op::Create(path),
            b'T' => Op::Truncate(path, offset),
            b'W' => Op::Write(path, offset, data),
            b'F' => Op::Flush(path),
            b'D' => Op::FlushFolder(path),
            b'R' => Op::Rename(path, second),
            b'L' => Op::Link(path, second),
            b'U' => Op::Unlink(path),
            b'M' => Op::MakeFolder(path),
            b'X' => Op::RemoveFolder(path),
            other => panic!("record kind {other}"),
        };
        ops.push((op, head[1] != 0));
    }
    ops
}

#[derive(Debug, Clone)]
enum Change {
    Write(u64, Vec<u8>),
    Truncate(u64),
}

fn apply(content: &mut Vec<u8>, change: &Change, upto: usize) {
    match change {
        Change::Truncate(len) => content.resize(*len as usize, 0),
        Change::Write(at, data) => {
            let (at, data) = (*at as usize, &data[..upto.min(data.len())]);
            if content.len() < at + data.len() {
                content.resize(at + data.len(), 0);
            }
            content[at..at + data.len()].copy_from_slice(data);
        }
    }
}

#[derive(Debug, Clone, Default)]
struct File {
    /// Content at the last flush.
    durable: Vec<u8>,
    pending: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Entry {
    File(String, usize),
    Folder(String),
    Rename(String, String),
    Gone(String),
}

impl Entry {
    fn touches(&self, folder: &str) -> bool {
        let parent = |p: &str| p.rsplit_once('/').map_or("", |(parent, _)| parent) == folder;
        match self {
            Entry::File(p, _) | Entry::Folder(p) | Entry::Gone(p) => parent(p),
            Entry::Rename(a, b) => parent(a) || parent(b),
        }
    }
}

/// A disk with a volatile cache. Changes of names reach it in order (the journal of ext4, xfs and btrfs) and are
/// sure only once the folder was flushed; data reach it in any order and in pieces of 512 bytes, and are sure only
/// once the file was flushed.
#[derive(Debug, Default)]
pub struct Disk {
    files: Vec<File>,
    entries: Vec<Entry>,
    sure: usize,
}

/// What is found after the power came back: folders, and files with their content.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    pub folders: BTreeSet<String>,
    pub files: BTreeMap<String, Vec<u8>>,
}

/// What happens to the changes that nobody flushed.
pub enum Fate<'a> {
    /// Nothing reached the disk.
    Lost,
    /// The names did, the data did not.
    NamesOnly,
    /// Everything did: a killed process.
    Kept,
    /// Some did: draws of numbers below the argument.
    Drawn(&'a mut dyn FnMut(usize) -> usize),
}

impl Disk {
    fn names(&self, upto: usize) -> (BTreeMap<String, usize>, BTreeSet<String>) {
        let (mut names, mut folders) = (BTreeMap::new(), BTreeSet::new());
        for entry in &self.entries[..upto] {
            match entry {
                Entry::File(path, file) => {
                    names.insert(path.clone(), *file);
                }
                Entry::Folder(path) => {
                    folders.insert(path.clone());
                }
                Entry::Gone(path) => {
                    names.remove(path);
                    folders.remove(path);
                }
                Entry::Rename(from, to) => {
                    if let Some(file) = names.remove(from) {
                        names.insert(to.clone(), file);
                    }
                    if folders.remove(from) {
                        folders.insert(to.clone());
                        let inside = format!("{from}/");
                        let below = |path: &String| Some(format!("{to}/{}", path.strip_prefix(&inside)?));
                        names = names.into_iter().map(|(p, f)| (below(&p).unwrap_or(p), f)).collect();
                        folders = folders.into_iter().map(|p| below(&p).unwrap_or(p)).collect();
                    }
                }
            }
        }
        (names, folders)
    }

    fn file(&mut self, path: &str) -> Option<&mut File> {
        let file = *self.names(self.entries.len()).0.get(path)?;
        Some(&mut self.files[file])
    }

    /// Takes in the next call.
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Create(path) => {
                self.files.push(File::default());
                self.entries.push(Entry::File(path.clone(), self.files.len() - 1));
            }
            Op::MakeFolder(path) => self.entries.push(Entry::Folder(path.clone())),
            Op::Unlink(path) | Op::RemoveFolder(path) => self.entries.push(Entry::Gone(path.clone())),
            Op::Rename(from, to) => self.entries.push(Entry::Rename(from.clone(), to.clone())),
            Op::Link(from, to) => {
                if let Some(file) = self.names(self.entries.len()).0.get(from) {
                    self.entries.push(Entry::File(to.clone(), *file));
                }
            }
            // A file without a name any more is nobody's business.
            Op::Truncate(path, len) => {
                if let Some(file) = self.file(path) {
                    file.pending.push(Change::Truncate(*len));
                }
            }
            Op::Write(path, at, data) => {
                if let Some(file) = self.file(path) {
                    file.pending.push(Change::Write(*at, data.clone()));
                }
            }
            Op::Flush(path) => {
                if let Some(file) = self.file(path) {
                    for change in std::mem::take(&mut file.pending) {
                        apply(&mut file.durable, &change, usize::MAX);
                    }
                }
            }
            Op::FlushFolder(path) => {
                if let Some(last) = self.entries.iter().rposition(|e| e.touches(path)) {
                    self.sure = self.sure.max(last + 1);
                }
            }
        }
    }

    /// What a power loss at this moment leaves.
    pub fn lose_power(&self, mut fate: Fate) -> Found {
        let names = match &mut fate {
            Fate::Lost => self.sure,
            Fate::NamesOnly | Fate::Kept => self.entries.len(),
            Fate::Drawn(below) => self.sure + below(self.entries.len() - self.sure + 1),
        };
        let (names, folders) = self.names(names);
        let mut found = Found { folders, ..Found::default() };
        for (path, file) in names {
            let file = &self.files[file];
            let mut content = file.durable.clone();
            for change in &file.pending {
                let upto = match &mut fate {
                    Fate::Lost | Fate::NamesOnly => continue,
                    Fate::Kept => usize::MAX,
                    Fate::Drawn(below) => match (below(3), change) {
                        (0, _) => continue,
                        (1, Change::Write(_, data)) => 512 * below(data.len() / 512 + 1),
                        _ => usize::MAX,
                    },
                };
                apply(&mut content, change, upto);
            }
            found.files.insert(path, content);
        }
        found
    }
}

impl Found {
    /// Calls that make a disk hold this, all of it durable.
    pub fn written(&self) -> Vec<Op> {
        let mut ops: Vec<Op> = self.folders.iter().cloned().map(Op::MakeFolder).collect();
        for (path, content) in &self.files {
            ops.push(Op::Create(path.clone()));
            ops.push(Op::Write(path.clone(), 0, content.clone()));
            ops.push(Op::Flush(path.clone()));
            let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
            ops.push(Op::FlushFolder(parent.to_string()));
        }
        ops
    }

    /// Hash of all names and contents.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = blake3::Hasher::new();
        for folder in &self.folders {
            hash.update(folder.as_bytes()).update(&[0]);
        }
        for (path, bytes) in &self.files {
            hash.update(path.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        }
        *hash.finalize().as_bytes()
    }

    /// Writes it all below a folder.
    pub fn write(&self, root: &Path) {
        for folder in &self.folders {
            std::fs::create_dir_all(root.join(folder)).expect("folder");
        }
        for (path, content) in &self.files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
            std::fs::write(path, content).expect("file");
        }
    }
}
