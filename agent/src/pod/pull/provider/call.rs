//! A call of a credential provider program.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_cni::ProcessGroup;
use coracle_events::printable;
use coracle_values::CollectMap;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::super::secret::Entry;
use super::config::{Entries, Settings};
use crate::duration;

/// Timeout of a call, as in the kubelet.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of the response.
const ANSWER_MAX: u64 = 1 << 20;
/// Maximum bytes of the program's standard error in the error. The rest is read and dropped.
const ERROR_OUTPUT_MAX: u64 = 1 << 10;

/// The reason why a program returned no credentials.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("cannot run the program: {0}")]
    Run(#[from] std::io::Error),
    #[error("the program did not respond within a minute")]
    Late,
    #[error("the program ended with {status}: {error_output}")]
    Status { status: std::process::ExitStatus, error_output: String },
    /// The error leaves out the parser's message, because it may quote a password.
    #[error("the response is invalid: {0:?} error at line {1} column {2}")]
    Json(serde_json::error::Category, usize, usize),
    #[error("the response is a {kind:?} of {api_version:?}")]
    Kind { kind: String, api_version: String },
    #[error("the response's cacheDuration {0:?} is not a duration")]
    Duration(String),
}

/// The images that a response is valid for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) enum KeyType {
    Image,
    Registry,
    Global,
}

pub(super) struct Answer {
    pub(super) key: KeyType,
    /// Time in the cache. None means the configured default.
    pub(super) cache: Option<Duration>,
    pub(super) entries: Entries,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    cache_key_type: KeyType,
    cache_duration: Option<String>,
    #[serde(default)]
    auth: Option<std::collections::BTreeMap<String, Login>>,
}

#[derive(Deserialize)]
struct Login {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

/// Runs a program with a request for an image's credentials.
pub(super) async fn call(settings: &Settings, program: &Path, image: &str) -> Result<Answer, CallError> {
    let request = json!({
        "apiVersion": settings.api_version,
        "kind": "CredentialProviderRequest",
        "image": image,
    });
    let answered = tokio::time::timeout(CALL_TIMEOUT, run(settings, program, request.to_string())).await;
    let response: Response = serde_json::from_slice(&answered.map_err(|_late| CallError::Late)??)
        .map_err(|error| CallError::Json(error.classify(), error.line(), error.column()))?;
    if response.kind != "CredentialProviderResponse" || response.api_version != settings.api_version {
        return Err(CallError::Kind { kind: response.kind, api_version: response.api_version });
    }
    let cache = match response.cache_duration {
        Some(text) => Some(duration::parse(&text).ok_or(CallError::Duration(text))?),
        None => None,
    };
    let entries = response.auth.into_iter().flatten();
    let entries =
        entries.map(|(key, login)| (key, Entry::login(login.username, login.password))).collect_map();
    Ok(Answer { key: response.cache_key_type, cache, entries })
}

async fn run(settings: &Settings, program: &Path, request: String) -> Result<Vec<u8>, CallError> {
    let mut command = Command::new(program);
    command
        .args(&settings.args)
        .envs(settings.env.iter().map(|variable| (&variable.name, &variable.value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    coracle_open_files::restore_limit(command.as_std_mut());
    let mut child = command.spawn()?;
    // The group must be dropped before the child, see `ProcessGroup`.
    let group = ProcessGroup::of(&child);
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let give = async {
        if let Some(mut stdin) = stdin {
            // The program may end without reading the request.
            let _not_read = stdin.write_all(request.as_bytes()).await;
        }
    };
    let (mut answer, mut error_output) = (Vec::new(), Vec::new());
    let take = async {
        match stdout {
            Some(stdout) => stdout.take(ANSWER_MAX).read_to_end(&mut answer).await,
            None => Ok(0),
        }
    };
    let listen = async {
        match stderr {
            Some(mut stderr) => {
                (&mut stderr).take(ERROR_OUTPUT_MAX).read_to_end(&mut error_output).await?;
                // Standard error is read to its end: a closed pipe would kill the program.
                tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await
            }
            None => Ok(0),
        }
    };
    let ((), taken, _) = tokio::join!(give, take, listen);
    taken?;
    let status = child.wait().await?;
    group.ended();
    if !status.success() {
        let error_output = printable(String::from_utf8_lossy(&error_output).trim(), error_output.len());
        return Err(CallError::Status { status, error_output });
    }
    Ok(answer)
}
