//! One call of a provider's program.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_events::printable;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::super::secret::Entry;
use super::{Entries, Settings, duration};

/// How long a program may take (as the kubelet allows).
const PATIENCE: Duration = Duration::from_secs(60);
/// Most of an answer, and of what is said besides, that is read.
const ANSWER_MAX: u64 = 1 << 20;
const COMPLAINT_MAX: u64 = 1 << 10;

/// Why a program gave no credentials.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("cannot run it: {0}")]
    Run(#[from] std::io::Error),
    #[error("it did not answer within a minute")]
    Late,
    #[error("it ended with {status}: {complaint}")]
    Status { status: std::process::ExitStatus, complaint: String },
    /// Without the parser's words: they may quote a password.
    #[error("cannot understand its answer: {0:?} error at line {1} column {2}")]
    Json(serde_json::error::Category, usize, usize),
    #[error("its answer is a {kind:?} of {api_version:?}")]
    Kind { kind: String, api_version: String },
    #[error("its answer is to be kept for {0:?}, which is no duration")]
    Duration(String),
}

/// What an answer is good for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) enum KeyType {
    Image,
    Registry,
    Global,
}

pub(super) struct Answer {
    pub(super) key: KeyType,
    /// How long to keep it; none: as the configuration says.
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

/// Asks a program for an image's credentials.
pub(super) async fn call(settings: &Settings, program: &Path, image: &str) -> Result<Answer, CallError> {
    let request = json!({
        "apiVersion": settings.api_version,
        "kind": "CredentialProviderRequest",
        "image": image,
    });
    let answered = tokio::time::timeout(PATIENCE, run(settings, program, request.to_string())).await;
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
    let entries = entries.map(|(key, login)| (key, Entry::login(login.username, login.password))).collect();
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
        .kill_on_drop(true);
    coracle_open_files::limit(command.as_std_mut());
    let mut child = command.spawn()?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let give = async {
        if let Some(mut stdin) = stdin {
            // A program that needs no question may have closed it.
            let _not_read = stdin.write_all(request.as_bytes()).await;
        }
    };
    let (mut answer, mut complaint) = (Vec::new(), Vec::new());
    let take = async {
        match stdout {
            Some(stdout) => stdout.take(ANSWER_MAX).read_to_end(&mut answer).await,
            None => Ok(0),
        }
    };
    let listen = async {
        match stderr {
            Some(mut stderr) => {
                (&mut stderr).take(COMPLAINT_MAX).read_to_end(&mut complaint).await?;
                // The rest too: a program that talks much must not be ended by a closed pipe.
                tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await
            }
            None => Ok(0),
        }
    };
    let ((), taken, _) = tokio::join!(give, take, listen);
    taken?;
    let status = child.wait().await?;
    if !status.success() {
        let complaint = printable(String::from_utf8_lossy(&complaint).trim(), complaint.len());
        return Err(CallError::Status { status, complaint });
    }
    Ok(answer)
}
