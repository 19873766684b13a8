//! Descriptions of a world's actions and of its final state.

use super::*;

impl World {
    /// Describes an action.
    pub fn describe(&self, action: Action) -> String {
        let Action::Step(qpn) = action else {
            return match action {
                Action::Post(c) => {
                    let client = &self.clients[c as usize];
                    format!("client {c} posts {:?}", client.program[client.next])
                }
                Action::Crash(c) => format!("client {c} crashes"),
                Action::Recover(c) => format!("client {c} resets its management queues"),
                Action::Begin(task) => format!("the CPU begins {task:?}"),
                _ => format!("the CPU goes on with {:?}", self.cpu.task),
            };
        };
        let role = self.roles.iter().find(|r| r.0 == qpn);
        let who = role.map_or_else(
            || format!("the CPU's QP {qpn}"),
            |(_, actor, name)| match actor {
                Actor::AllocWorker(c)
                | Actor::FreeWorker(c)
                | Actor::Front(c)
                | Actor::Client(c) => {
                    format!("{name} of client {c}")
                }
                Actor::Cpu => name.to_string(),
            },
        );
        let mut what = String::new();
        if let (Some((_, ring)), Some(info)) = (self.worker_ring(qpn), query(&self.physical, qpn)) {
            let at = info.progress.send_consumer as usize * 64 % ring.len();
            let mut ctrl = [0; 4];
            ring.read(at, &mut ctrl);
            what = format!(": {} at block {}", opcode_name(ctrl[3]), at / 64);
        }
        format!("{who}{what}")
    }

    /// Describes the final state, without addresses.
    pub fn summary(&self) -> String {
        let mut all = format!("{:?}", &self.spec.chunk[..self.memory.shape.chunks as usize]);
        for client in &self.clients {
            all.push_str(" |");
            for outcome in &client.outcome {
                match outcome {
                    Outcome::Granted(grant) => all.push_str(&format!(" Granted({})", grant.entry)),
                    other => all.push_str(&format!(" {other:?}")),
                }
            }
        }
        all
    }
}

fn opcode_name(opcode: u8) -> &'static str {
    use verbs::wqe::opcode as o;
    match opcode {
        o::NOP => "NOP",
        o::WAIT => "WAIT",
        o::RDMA_READ => "READ",
        o::RDMA_WRITE => "WRITE",
        o::RDMA_WRITE_IMM => "WRITE with immediate",
        o::ATOMIC_MASKED_FA => "masked FAA",
        o::ATOMIC_MASKED_CS => "masked CAS",
        o::UMR => "UMR",
        o::SEND => "SEND",
        o::SEND_EN => "SEND_EN",
        o::RECV_EN => "RECV_EN",
        _ => "something else",
    }
}
