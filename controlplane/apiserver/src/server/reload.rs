//! Reloads configuration files when they change. An invalid file is logged, and the current configuration stays.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use crate::{
    authn::{AnonymousConfig, AuthenticationConfig},
    config::{OpenError, read_authentication},
    file_watch,
    state::State,
};

/// The watched files.
pub(super) struct Files {
    pub(super) authorization: Option<PathBuf>,
    pub(super) authentication: Option<AuthenticationFile>,
}

/// The authentication configuration file.
pub(super) struct AuthenticationFile {
    path: PathBuf,
    /// Text of the last read.
    text: Mutex<String>,
    /// Whether anonymous requests are refused, even if the file enables them.
    refuses_anonymous: bool,
}

/// Starts a task for each file.
pub(super) fn start(state: &Arc<State>, files: Files) {
    if let Some(path) = files.authorization {
        coracle_threads::spawn(follow_authorization(Arc::downgrade(state), path));
    }
    if let Some(file) = files.authentication {
        coracle_threads::spawn(follow_authentication(Arc::downgrade(state), file));
    }
}

async fn follow_authorization(state: Weak<State>, path: PathBuf) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    let shown = path.display().to_string();
    let reload = move || {
        let Some(state) = state.upgrade() else { return true };
        let reloaded = state.authorizers.reload();
        if let Ok(false) = reloaded {
            return true;
        }
        state.metrics.reloaded_authorization(reloaded.is_ok());
        match reloaded {
            Ok(_) => {
                tracing::info!(path = shown, "authorization configuration reloaded");
                true
            }
            Err(reason) => {
                tracing::error!(
                    path = shown,
                    reason,
                    "cannot use the changed authorization configuration; keeping the current one"
                );
                false
            }
        }
    };
    file_watch::follow_file(path, shutdown, reload).await;
}

async fn follow_authentication(state: Weak<State>, file: AuthenticationFile) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    let path = file.path.clone();
    let reload = move || state.upgrade().is_none_or(|state| file.reload(&state));
    file_watch::follow_file(path, shutdown, reload).await;
}

// === impl AuthenticationFile ===

impl AuthenticationFile {
    /// Reads the file for the first time. Without a path there is no file, and the default configuration applies.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid.
    pub(super) fn open(
        path: Option<&Path>,
        refuses_anonymous: bool,
    ) -> Result<(AuthenticationConfig, Option<Self>), OpenError> {
        let (mut config, text) = read_authentication(path)?;
        if refuses_anonymous {
            config.anonymous = AnonymousConfig::Disabled;
        }
        let file = path.map(|path| Self { path: path.to_owned(), text: Mutex::new(text), refuses_anonymous });
        Ok((config, file))
    }

    /// Applies the file's content if it has changed. Returns whether the content is used.
    fn reload(&self, state: &State) -> bool {
        let path = self.path.display();
        let (mut config, text) = match read_authentication(Some(&self.path)) {
            Ok(read) => read,
            Err(error) => return Self::failed(state, &error.to_string()),
        };
        let mut known = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == text {
            return true;
        }
        if self.refuses_anonymous {
            config.anonymous = AnonymousConfig::Disabled;
        }
        if let Err(reason) = state.authenticators.replace(config) {
            return Self::failed(state, &format!("{path}: {reason}"));
        }
        *known = text;
        state.metrics.reloaded_authentication(true);
        tracing::info!(%path, "authentication configuration reloaded");
        true
    }

    /// Reports that the content cannot be used. Returns false.
    fn failed(state: &State, reason: &str) -> bool {
        state.metrics.reloaded_authentication(false);
        tracing::error!(
            reason,
            "cannot use the changed authentication configuration; keeping the current one"
        );
        false
    }
}
