//! Runs plugin executables. Their input is the environment and standard input. Their output is a result or an error
//! object.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use futures::future::BoxFuture;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::process::{Child, Command as Process};
use tracing::warn;

use crate::error::Error;
use crate::process_group::ProcessGroup;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;

/// Attempts to run a plugin that is being written, and the delay between them: five seconds in total.
const BUSY_TRIES: u32 = 100;
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Maximum size of the result of a plugin in bytes. A plugin with a larger result is killed.
const RESULT_MAX: usize = 1 << 20;
/// Bytes of a plugin's standard error that are kept.
const MESSAGES_MAX: u64 = 64 << 10;

/// Directories of plugin executables, and how they run.
#[derive(Debug, Clone)]
pub(crate) struct Executables {
    pub(crate) path: Vec<PathBuf>,
    pub(crate) timeout: Duration,
    /// Whether each executable leads a process group of its own, which is killed as a whole. True in a runtime. False
    /// in a plugin: the plugins that it runs stay in its process group, and are killed with this group.
    pub(crate) leads_group: bool,
}

/// Error object of a plugin (section 5, "Error").
#[derive(Deserialize)]
struct Refusal {
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

impl Executables {
    /// The executable of this type, from the first directory that contains it.
    pub(crate) fn find(&self, kind: &str) -> Result<PathBuf, Error> {
        let is_executable = |path: &Path| {
            path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        let found = self.path.iter().map(|dir| dir.join(kind)).find(|path| is_executable(path));
        found.ok_or_else(|| Error::NoPlugin { kind: kind.to_owned(), path: self.path.clone() })
    }

    /// Whether the executable of this type is the program of this process.
    pub(crate) fn is_this_program(&self, kind: &str) -> bool {
        let file = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
        self.find(kind)
            .is_ok_and(|path| file(&path).is_some() && file(&path) == file(Path::new("/proc/self/exe")))
    }

    /// Runs the plugin, and kills it after the timeout. The future is boxed for the same reason as that of
    /// [`plugin::run`](crate::plugin::run).
    pub(crate) fn run<'a>(
        &'a self,
        kind: &'a str,
        request: &'a Request,
    ) -> BoxFuture<'a, Result<Option<Answer>, Error>> {
        Box::pin(self.run_process(kind, request))
    }

    async fn run_process(&self, kind: &str, request: &Request) -> Result<Option<Answer>, Error> {
        let program = self.find(kind)?;
        let failed = |source| Error::Run { kind: kind.to_owned(), source };
        let input = serde_json::to_vec(&request.conf).map_err(|error| failed(error.into()))?;
        let mut child = self.start_when_written(&program, request).await.map_err(failed)?;
        // The group is dropped before the child. Until the child is dropped, the number of the process group cannot be
        // reused.
        let group = self.leads_group.then(|| ProcessGroup::of(&child));
        let Ok(output) = tokio::time::timeout(self.timeout, exchange(&mut child, &input)).await else {
            let reason = format!("it did not end within {} s and was killed", self.timeout.as_secs());
            return Err(failed(io::Error::new(io::ErrorKind::TimedOut, reason)));
        };
        let output = output.map_err(failed)?;
        if let Some(group) = group {
            group.ended();
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        if !stderr.trim().is_empty() {
            warn!(
                plugin = kind,
                command = request.command.name(),
                stderr = stderr.trim(),
                "a CNI plugin wrote to standard error"
            );
        }
        if !output.status.success() {
            return Err(refusal(kind, &output.stdout, &stderr, &output.status.to_string()));
        }
        answer(request, &output.stdout)
    }

    /// Starts the executable. While the file is open for writing (ETXTBSY), the start is retried, as in libcni: the
    /// file is being replaced, or a process that forked in the meantime still has the descriptor.
    async fn start_when_written(&self, program: &Path, request: &Request) -> io::Result<Child> {
        let busy = |error: &io::Error| error.kind() == io::ErrorKind::ExecutableFileBusy;
        for _ in 0..BUSY_TRIES {
            match self.start(program, request) {
                Err(error) if busy(&error) => tokio::time::sleep(BUSY_RETRY_DELAY).await,
                done => return done,
            }
        }
        self.start(program, request)
    }

    fn start(&self, program: &Path, request: &Request) -> io::Result<Child> {
        let path: Vec<_> = self.path.iter().map(|dir| dir.as_os_str()).collect();
        let mut process = Process::new(program);
        process.env("CNI_COMMAND", request.command.name()).env("CNI_PATH", path.join(":".as_ref()));
        for (name, value) in [
            ("CNI_CONTAINERID", &request.container_id),
            ("CNI_IFNAME", &request.ifname),
            ("CNI_ARGS", &request.args),
        ] {
            process.env(name, value);
        }
        let netns = request.netns.as_deref().unwrap_or(Path::new(""));
        process.env("CNI_NETNS", netns);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if self.leads_group {
            process.process_group(0);
        }
        coracle_open_files::restore_limit(process.as_std_mut());
        process.kill_on_drop(true).spawn()
    }
}

/// Writes the configuration to the plugin, and waits for its output and its end. A plugin may write before it has read
/// its input.
async fn exchange(child: &mut Child, input: &[u8]) -> io::Result<Output> {
    let (stdin, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let ((), stdout, stderr) = tokio::try_join!(write(stdin, input), read_result(out), read_messages(err))?;
    Ok(Output { status: child.wait().await?, stdout, stderr })
}

/// Writes the input, and closes the pipe. A plugin may answer without reading all of its input.
async fn write(pipe: Option<impl AsyncWrite + Unpin>, input: &[u8]) -> io::Result<()> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    match pipe.write_all(input).await {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

async fn read_result(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe
        && pipe.take(RESULT_MAX as u64 + 1).read_to_end(&mut bytes).await? > RESULT_MAX
    {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "its output is larger than 1 MiB"));
    }
    Ok(bytes)
}

/// Reads the first part of the messages, and discards the rest.
async fn read_messages(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        (&mut pipe).take(MESSAGES_MAX).read_to_end(&mut bytes).await?;
        tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await?;
    }
    Ok(bytes)
}

/// The error of a plugin: its error object, or its output.
fn refusal(kind: &str, stdout: &[u8], stderr: &str, status: &str) -> Error {
    let kind = kind.to_owned();
    match serde_json::from_slice::<Refusal>(stdout) {
        Ok(Refusal { code, msg: message, details }) => Error::Plugin { kind, code, message, details },
        Err(_) => {
            let (out, err) = (String::from_utf8_lossy(stdout), stderr.trim());
            let message = format!("ended with {status} and no error object");
            Error::Plugin {
                kind,
                // `ErrInternal` of libcni.
                code: 999,
                message,
                details: format!("{} {err}", out.trim()).trim().to_owned(),
            }
        }
    }
}

fn answer(request: &Request, stdout: &[u8]) -> Result<Option<Answer>, Error> {
    if request.command != Command::Add || stdout.trim_ascii().is_empty() {
        return Ok(None);
    }
    let wrong =
        |error: serde_json::Error| Error::Decode { what: "a plugin's result", reason: error.to_string() };
    Answer::parse(serde_json::from_slice(stdout).map_err(wrong)?, request.version()?).map(Some)
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;
    use nix::unistd::Pid;
    use serde_json::json;

    use super::*;

    fn plugin(script: &str) -> (tempfile::TempDir, Executables) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("test");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let executables = Executables {
            path: vec!["/absent".into(), dir.path().to_owned()],
            timeout: Duration::from_secs(60),
            leads_group: true,
        };
        (dir, executables)
    }

    fn request() -> Request {
        let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "test"});
        Request {
            container_id: "id1".into(),
            netns: Some("/proc/1/ns/net".into()),
            ..Request::for_test(&conf, "IgnoreUnknown=1;A=b")
        }
    }

    #[tokio::test]
    async fn a_plugin_gets_environment_and_configuration_and_returns_a_result() {
        let script = r#"[ "$CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS" = \
            "ADD id1 /proc/1/ns/net eth0 IgnoreUnknown=1;A=b" ] || exit 9
            grep -q '"name":"n"' || exit 8
            echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/8"}]}'"#;
        let (_dir, executables) = plugin(script);
        let answer = executables.run("test", &request()).await.unwrap().unwrap();
        assert_eq!(answer.ips[0].address.to_string(), "10.0.0.2/8");
    }

    #[tokio::test]
    async fn an_error_object_is_returned_unchanged() {
        let (_dir, executables) = plugin(r#"echo '{"code":11,"msg":"later","details":"busy"}'; exit 1"#);
        let error = executables.run("test", &request()).await.unwrap_err();
        assert_eq!((error.code(), error.to_string()), (11, "plugin test: later; busy (code 11)".to_owned()));
        let (_dir, executables) = plugin("echo no; echo JSON >&2; exit 3");
        let error = executables.run("test", &request()).await.unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no JSON"), "{error}");
    }

    #[tokio::test]
    async fn a_plugin_that_hangs_is_killed_and_an_absent_plugin_is_named() {
        let (_dir, mut executables) = plugin("exec sleep 100");
        executables.timeout = Duration::from_millis(200);
        let error = executables.run("test", &request()).await.unwrap_err();
        assert!(error.chain().contains("was killed"), "{}", error.chain());
        let error = executables.run("other", &request()).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot find the plugin other in /absent:"), "{error}");
    }

    #[tokio::test]
    async fn children_of_a_plugin_are_killed_with_it_and_stay_when_it_ends() {
        let (dir, mut executables) =
            plugin("sleep 100 >/dev/null 2>&1 & echo $! >$(dirname $0)/child; $WAIT");
        executables.timeout = Duration::from_secs(2);
        let child = dir.path().join("child");
        let is_alive = || {
            let id = std::fs::read_to_string(&child).unwrap();
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        assert_eq!(executables.run("test", &request()).await.unwrap(), None);
        assert!(is_alive(), "the child of an ended plugin");
        let id: i32 = std::fs::read_to_string(&child).unwrap().trim().parse().unwrap();
        nix::sys::signal::kill(Pid::from_raw(id), Signal::SIGKILL).unwrap();
        let script = std::fs::read_to_string(dir.path().join("test")).unwrap().replace("$WAIT", "wait");
        std::fs::write(dir.path().join("test"), script).unwrap();
        assert!(executables.run("test", &request()).await.unwrap_err().chain().contains("was killed"));
        coracle_testing::until("the child of a killed plugin is killed", 10, || !is_alive()).await;
    }

    #[tokio::test]
    async fn the_start_of_a_plugin_waits_until_its_file_is_written() {
        let (dir, executables) = plugin("true");
        let path = dir.path().join("test");
        let writer = std::fs::File::options().append(true).open(&path).unwrap();
        assert_eq!(
            executables.start(&path, &request()).unwrap_err().kind(),
            io::ErrorKind::ExecutableFileBusy
        );
        let request = request();
        let mut running = executables.run("test", &request);
        // The first attempt finds that the file is open for writing.
        assert!(futures::poll!(&mut running).is_pending());
        drop(writer);
        assert_eq!(running.await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_plugin_may_write_before_it_reads() {
        let script =
            r#"head -c 262144 /dev/zero | tr '\0' ' '; cat >/dev/null; echo '{"cniVersion":"1.0.0"}'"#;
        let (_dir, executables) = plugin(script);
        let mut request = request();
        request.conf.insert("long".to_owned(), "x".repeat(262_144).into());
        assert!(executables.run("test", &request).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn the_output_of_a_plugin_is_limited() {
        let (_dir, executables) = plugin("head -c 2097152 /dev/zero | tr '\\0' ' '");
        let error = executables.run("test", &request()).await.unwrap_err();
        assert!(error.chain().contains("larger than 1 MiB"), "{}", error.chain());
        let (_dir, executables) = plugin("head -c 2097152 /dev/zero | tr '\\0' x >&2; exit 3");
        let error = executables.run("test", &request()).await.unwrap_err().to_string();
        assert!((65_536..66_000).contains(&error.len()), "{}", error.len());
    }

    #[tokio::test]
    async fn invalid_results_are_refused() {
        let (_dir, executables) = plugin("echo hello");
        assert_eq!(executables.run("test", &request()).await.unwrap_err().code(), 6);
        let (_dir, executables) = plugin("true");
        assert_eq!(executables.run("test", &request()).await.unwrap(), None);
    }
}
