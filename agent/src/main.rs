//! The `coracle` binary: one program, a role per subcommand.

mod lock;
mod role;
mod settings;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::settings::{ControlPlaneSettings, LogSettings, NodeSettings, Places, Settings};

/// The whole Kubernetes node in one light binary, and a thin control plane beside it.
#[derive(Parser)]
#[command(name = "coracle", version, max_term_width = 100, disable_help_subcommand = true)]
struct Command {
    #[command(flatten)]
    log: LogSettings,
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Run a whole cluster here: control plane and node in one process. No configuration needed.
    ///
    /// Ctrl-C stops both but not the pods; run it again and it takes them over as they are.
    #[cfg(feature = "controlplane")]
    Up {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        node: NodeSettings,
        #[command(flatten)]
        plane: ControlPlaneSettings,
    },
    /// Run the node alone, for a control plane elsewhere.
    Agent {
        /// How to reach the API server, and as whom.
        #[arg(long, value_name = "FILE")]
        kubeconfig: std::path::PathBuf,
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        node: NodeSettings,
    },
    /// Run the control plane alone: API server, controllers, scheduler and store.
    #[cfg(feature = "controlplane")]
    Controlplane {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        plane: ControlPlaneSettings,
        /// Also write credentials for an agent of this name on this machine, and print the command that uses them.
        #[arg(long, value_name = "NAME")]
        issue_node: Option<String>,
    },
    /// Serve the container runtime interface (CRI v1) alone, for crictl, critest or a kubelet.
    Runtime(role::runtime::Arguments),
    /// Import, list and remove container images.
    Image(role::image::Arguments),
    /// Say what this machine lacks, by name, and what that costs.
    Check {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        node: NodeSettings,
    },
    /// Stop the cluster here and remove every pod, interface, mount and cgroup of it.
    Down(role::down::Arguments),
    /// Print the version.
    Version,
    /// Hold one pod (started by the node, never by hand).
    #[command(hide = true)]
    Shim {
        #[arg(long)]
        dir: std::path::PathBuf,
    },
}

fn main() -> ExitCode {
    let command = Command::parse();
    // Before anything that starts a thread: the shim forks, and a fork of a threaded process may hang.
    if let Role::Shim { dir } = command.role {
        return coracle_shim::main(coracle_shim::ShimArgs { dir });
    }
    match command.log.start().and_then(|()| run(command.role)) {
        Ok(code) => code,
        Err(error) => role::fail(&error),
    }
}

fn run(role: Role) -> anyhow::Result<ExitCode> {
    let none = ControlPlaneSettings::default;
    match role {
        #[cfg(feature = "controlplane")]
        Role::Up { places, node, plane } => {
            role::block_on(role::up::run(Settings::load(places, node, plane)?))
        }
        Role::Agent { kubeconfig, places, node } => {
            role::block_on(role::agent::run(Settings::load(places, node, none())?, kubeconfig))
        }
        #[cfg(feature = "controlplane")]
        Role::Controlplane { places, plane, issue_node } => {
            let settings = Settings::load(places, NodeSettings::default(), plane)?;
            role::block_on(role::controlplane::run(settings, issue_node))
        }
        Role::Runtime(arguments) => role::block_on(role::runtime::run(arguments)),
        Role::Image(arguments) => role::block_on(role::image::run(arguments)),
        Role::Check { places, node } => role::check::run(&Settings::load(places, node, none())?.node()?),
        Role::Down(arguments) => role::block_on(role::down::run(arguments)),
        Role::Version => role::version(),
        Role::Shim { dir } => Ok(coracle_shim::main(coracle_shim::ShimArgs { dir })),
    }
}
