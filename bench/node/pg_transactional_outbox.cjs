// pg-transactional-outbox with RabbitMQ: `setup` makes its table and slot, `relay` publishes what its listener brings.
// Its best settings: no protection against poisonous messages, as many messages at once as it has connections, read
// committed, and one channel with confirms. Messages that it handled stay in its table, marked.

const { Client } = require("pg");
const amqp = require("amqplib");
const outbox = require("pg-transactional-outbox");

const AT_ONCE = Number(process.env.BENCH_AT_ONCE);
const TABLE = "peer_outbox";
const NAME = "peer";

const setup = {
  outboxOrInbox: "outbox",
  database: "postgres",
  schema: "public",
  table: TABLE,
  listenerRole: "outbox",
  publication: NAME,
  replicationSlot: NAME,
};

async function make() {
  const client = new Client({ connectionString: process.env.BENCH_URL });
  await client.connect();
  const drop = `SELECT pg_drop_replication_slot('${NAME}') FROM pg_replication_slots WHERE slot_name = '${NAME}'`;
  await client.query(drop);
  await client.query(outbox.DatabaseSetup.dropAndCreateTable(setup));
  await client.query(outbox.DatabaseSetup.setupReplicationCore(setup));
  await client.query(`SELECT pg_create_logical_replication_slot('${NAME}', 'pgoutput')`);
  await client.end();
}

async function relay() {
  const connection = await amqp.connect(process.env.BENCH_RABBITMQ_URL);
  const channel = await connection.createConfirmChannel();
  const database = { connectionString: process.env.BENCH_URL, max: AT_ONCE };
  const publish = (message) =>
    new Promise((resolve, reject) => {
      const options = { mandatory: true, persistent: true, contentType: "application/json", messageId: message.id };
      const body = Buffer.from(JSON.stringify(message.payload));
      channel.publish(process.env.BENCH_EXCHANGE, message.messageType, body, options, (error) =>
        error ? reject(error) : resolve(),
      );
    });
  outbox.initializeReplicationMessageListener(
    {
      outboxOrInbox: "outbox",
      dbListenerConfig: database,
      dbHandlerConfig: database,
      settings: {
        dbSchema: "public",
        dbTable: TABLE,
        dbPublication: NAME,
        dbReplicationSlot: NAME,
        enableMaxAttemptsProtection: false,
        enablePoisonousMessageProtection: false,
        messageCleanupIntervalInMs: 0,
        messageProcessingTimeoutInMs: 600_000,
      },
    },
    { handle: publish },
    outbox.getDisabledLogger(),
    {
      concurrencyStrategy: outbox.createReplicationSemaphoreConcurrencyController(AT_ONCE),
      messageProcessingTransactionLevelStrategy: () => outbox.IsolationLevel.ReadCommitted,
    },
  );
}

if (process.argv[2] === "setup") make();
else relay();
