//! One worker process: started, spoken to with deadlines, killed. Nothing here knows environments.
//!
//! Three threads per process keep every operation interruptible: one writes requests (a worker that
//! does not read must not block us), one reads replies, one keeps the last lines of stderr. The caller
//! only ever waits on a channel with a timeout. A fourth thread, one for all processes, starts them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::env::EnvError;

/// Lines of stderr kept for error messages.
const STDERR_LINES: usize = 12;
/// Bytes of one kept stderr line.
const STDERR_LINE_BYTES: u64 = 400;
/// How long a worker that closed its stdout may take to exit by itself, milliseconds.
const EXIT_GRACE_MS: u64 = 500;

/// How to start a worker.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Environment name, for error messages.
    pub env: String,
    /// Program.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
    /// Environment variables added to ours.
    pub vars: Vec<(String, OsString)>,
    /// Longest reply line, bytes.
    pub reply_bytes: usize,
}

/// What the reader thread saw.
enum Reply {
    Line(Vec<u8>),
    TooLong,
    End,
}

/// A running worker. Dropping it kills its process group and reaps it.
pub(super) struct Process {
    env: String,
    child: Child,
    requests: SyncSender<Vec<u8>>,
    replies: Receiver<Reply>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    /// Disconnects when stderr is at its end.
    stderr_end: Receiver<()>,
    reply_bytes: usize,
    next_rid: u64,
}

unsafe extern "C" {
    /// `kill(2)`; the standard library already links the C library.
    fn kill(pid: i32, signal: i32) -> i32;
    /// `prctl(2)`.
    #[cfg(target_os = "linux")]
    fn prctl(option: i32, ...) -> i32;
}

const SIGKILL: i32 = 9;
#[cfg(target_os = "linux")]
const PR_SET_PDEATHSIG: i32 = 1;

/// A command to start, and where its process goes.
type Order = (Command, SyncSender<std::io::Result<Child>>);

/// Starts a process that dies with us even if we are killed (Linux). The kernel ties it to the *thread* that
/// started it, so one thread that lives as long as we do starts them all.
fn spawn(mut command: Command) -> std::io::Result<Child> {
    static ORDERS: OnceLock<SyncSender<Order>> = OnceLock::new();
    let orders = ORDERS.get_or_init(|| {
        let (orders, taken) = sync_channel::<Order>(1);
        std::thread::spawn(move || {
            while let Ok((mut command, answer)) = taken.recv() {
                // Whoever asked waits for it.
                let _ = answer.send(command.spawn());
            }
        });
        orders
    });
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::process::{CommandExt, parent_id};
        let us = std::process::id();
        let tied = move || {
            // SAFETY: prctl(2) with this option takes a signal number and touches no memory.
            if unsafe { prctl(PR_SET_PDEATHSIG, SIGKILL as std::ffi::c_ulong) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // We may have died before the line above: then nobody would send the signal.
            if parent_id() == us { Ok(()) } else { Err(std::io::ErrorKind::BrokenPipe.into()) }
        };
        // SAFETY: between fork and exec `tied` makes two system calls and allocates nothing.
        unsafe { command.pre_exec(tied) };
    }
    let (answer, child) = sync_channel(1);
    let gone = || std::io::Error::other("the thread that starts processes is gone");
    orders.send((command, answer)).map_err(|_| gone())?;
    child.recv().map_err(|_| gone())?
}

impl Process {
    /// Starts a worker in its own process group.
    pub(super) fn start(launch: &Launch) -> Result<Process, EnvError> {
        use std::os::unix::process::CommandExt;
        let died = |detail: String| EnvError::Died { env: launch.env.clone(), op: "start".into(), detail };
        let mut command = Command::new(&launch.program);
        command
            .args(&launch.args)
            .envs(launch.vars.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Its own group: a Ctrl-C at the terminal is ours to handle, and its children die with it.
            .process_group(0);
        let mut child =
            spawn(command).map_err(|e| died(format!("{} could not be started: {e}", launch.program.display())))?;
        let (Some(mut stdin), Some(stdout), Some(err)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(died("its pipes could not be made".into()));
        };
        let (requests, to_write) = sync_channel::<Vec<u8>>(1);
        std::thread::spawn(move || {
            // Ends when the process is dropped or stops reading; dropping stdin tells the worker to exit.
            while let Ok(line) = to_write.recv() {
                if stdin.write_all(&line).and_then(|()| stdin.flush()).is_err() {
                    break;
                }
            }
        });
        let (sender, replies) = channel();
        let limit = launch.reply_bytes;
        std::thread::spawn(move || read_replies(BufReader::with_capacity(1 << 16, stdout), limit, &sender));
        let stderr = Arc::new(Mutex::new(VecDeque::new()));
        let (end, stderr_end) = channel::<()>();
        let kept = Arc::clone(&stderr);
        std::thread::spawn(move || {
            keep_last_lines(BufReader::new(err), &kept);
            drop(end);
        });
        Ok(Process {
            env: launch.env.clone(),
            child,
            requests,
            replies,
            stderr,
            stderr_end,
            reply_bytes: launch.reply_bytes,
            next_rid: 0,
        })
    }

    /// One request and its reply. After any error but [`EnvError::Refused`] the process must be dropped:
    /// a late answer would be taken for the next one's.
    pub(super) fn ask(
        &mut self,
        op: &str,
        mut request: serde_json::Map<String, serde_json::Value>,
        deadline_ms: u64,
    ) -> Result<serde_json::Map<String, serde_json::Value>, EnvError> {
        self.next_rid += 1;
        let rid = self.next_rid;
        request.insert("rid".into(), rid.into());
        request.insert("op".into(), op.into());
        let mut line = serde_json::Value::Object(request).to_string().into_bytes();
        line.push(b'\n');
        // The queue holds one line and the writer has finished the last one or is stuck in it; in the
        // second case the worker missed that deadline and we are not here.
        if self.requests.try_send(line).is_err() {
            return Err(self.died(op));
        }
        let reply = match self.replies.recv_timeout(Duration::from_millis(deadline_ms)) {
            Ok(Reply::Line(bytes)) => bytes,
            Ok(Reply::TooLong) => {
                return Err(self.protocol(op, format!("a line of more than {} bytes", self.reply_bytes)));
            }
            Ok(Reply::End) | Err(RecvTimeoutError::Disconnected) => return Err(self.died(op)),
            Err(RecvTimeoutError::Timeout) => {
                self.kill();
                return Err(EnvError::Deadline { env: self.env.clone(), op: op.into(), after_ms: deadline_ms });
            }
        };
        let value: serde_json::Value = serde_json::from_slice(&reply)
            .map_err(|e| self.protocol(op, format!("not JSON ({e}): {}", excerpt(&reply))))?;
        let serde_json::Value::Object(mut object) = value else {
            return Err(self.protocol(op, format!("not an object: {}", excerpt(&reply))));
        };
        let got = object.remove("rid");
        if got.as_ref().and_then(serde_json::Value::as_u64) != Some(rid) {
            let got = got.map_or_else(|| "none".to_owned(), |v| v.to_string());
            return Err(self.protocol(op, format!("rid {got} where {rid} was expected")));
        }
        match object.get("error") {
            None => Ok(object),
            Some(error) => {
                let field = |name: &str| error.get(name).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
                Err(EnvError::Refused {
                    env: self.env.clone(),
                    op: op.into(),
                    kind: field("kind"),
                    message: field("message"),
                })
            }
        }
    }

    /// Whether it still runs.
    pub(super) fn alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Operating-system process id.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    fn protocol(&self, op: &str, detail: String) -> EnvError {
        EnvError::Protocol { env: self.env.clone(), op: op.into(), detail }
    }

    /// The error for a worker whose stdout ended: its exit status and last words.
    fn died(&mut self, op: &str) -> EnvError {
        let mut status = None;
        for _ in 0..EXIT_GRACE_MS / 10 {
            status = self.child.try_wait().ok().flatten();
            if status.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.kill();
        let status = match status {
            Some(s) => s.to_string(),
            None => "it closed its output without exiting".into(),
        };
        let _ = self.stderr_end.recv_timeout(Duration::from_millis(EXIT_GRACE_MS));
        let lines = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let last = lines.iter().map(String::as_str).collect::<Vec<_>>().join(" | ");
        let detail = if last.is_empty() { status } else { format!("{status}; stderr: {last}") };
        EnvError::Died { env: self.env.clone(), op: op.into(), detail }
    }

    /// Kills the whole group and reaps the worker. SIGKILL at once: there is no state worth saving, and a
    /// worker may ignore anything milder.
    fn kill(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            if let Ok(pid) = i32::try_from(self.child.id()) {
                // SAFETY: kill(2) touches no memory. The child is not reaped yet (try_wait said so and only
                // this thread waits), so its id, which is also its group's id, cannot have been reused.
                unsafe { kill(-pid, SIGKILL) };
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn read_replies(mut from: impl BufRead, limit: usize, to: &Sender<Reply>) {
    loop {
        let mut line = Vec::new();
        let reply = match (&mut from).take(limit as u64 + 1).read_until(b'\n', &mut line) {
            Ok(_) if line.last() == Some(&b'\n') => Reply::Line(line),
            Ok(n) if n > limit => Reply::TooLong,
            // An unfinished last line is a death, not an answer.
            _ => Reply::End,
        };
        let last = !matches!(reply, Reply::Line(_));
        if to.send(reply).is_err() || last {
            return;
        }
    }
}

fn keep_last_lines(mut from: impl BufRead, kept: &Mutex<VecDeque<String>>) {
    loop {
        let mut line = Vec::new();
        match (&mut from).take(STDERR_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                let mut lines = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.len() == STDERR_LINES {
                    lines.pop_front();
                }
                if !text.is_empty() {
                    lines.push_back(text);
                }
            }
        }
    }
}

/// The beginning of a reply, printable.
fn excerpt(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(120)];
    String::from_utf8_lossy(cut).trim_end().escape_debug().to_string()
}
