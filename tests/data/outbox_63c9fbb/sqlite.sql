BEGIN TRANSACTION;
CREATE TABLE old_queues (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	done_at DATETIME, 
	lease_until DATETIME, 
	lease_token CHAR(32), 
	unroutable BOOLEAN DEFAULT 0 NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	due_at DATETIME NOT NULL, 
	first_due_at DATETIME, 
	routed_at DATETIME, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	starts INTEGER DEFAULT '0' NOT NULL, 
	destination VARCHAR(255) DEFAULT '' NOT NULL, 
	routing_key VARCHAR(255) NOT NULL, 
	"key" VARCHAR(255), 
	message_id VARCHAR(255) NOT NULL, 
	timer_id VARCHAR(255), 
	content_type VARCHAR(255) NOT NULL, 
	tracking_ids TEXT, 
	headers TEXT, 
	history TEXT, 
	body BLOB NOT NULL
);
INSERT INTO "old_queues" VALUES(1,'2024-05-31 06:09:41.411000',NULL,NULL,0,'2024-05-31 06:09:41.216000',NULL,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.295000',1,1,'audit','order.created','customer 7','01a1e820-1d5f-75b4-9325-b47ce2d21de0',NULL,'application/json',NULL,NULL,NULL,X'226C656173656422');
INSERT INTO "old_queues" VALUES(2,'2024-05-31 06:09:41.411000',NULL,NULL,0,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.295000',1,1,'audit','order.created','customer 7','01a1e820-1d6f-70b8-b562-23e6aa343d98',NULL,'application/json',NULL,NULL,NULL,X'22726F7574656422');
INSERT INTO "old_queues" VALUES(3,'2024-05-31 06:09:41.411000',NULL,NULL,0,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.295000',1,1,'audit','order.created','customer 7','01a1e820-1d6f-7594-9430-0582bdc98ccc',NULL,'application/json',NULL,NULL,NULL,X'227265747279696E6722');
INSERT INTO "old_queues" VALUES(4,'2024-05-31 06:09:41.411000',NULL,NULL,0,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.295000',1,1,'audit','order.created','customer 7','01a1e820-1d70-7721-86db-ead41cdbb121',NULL,'application/json',NULL,NULL,NULL,X'22646F6E6522');
INSERT INTO "old_queues" VALUES(5,NULL,NULL,NULL,0,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.295000',0,0,'audit','order.created','customer 7','01a1e820-1d70-7715-afe2-ce4cad176102',NULL,'application/json',NULL,NULL,NULL,X'226465616422');
INSERT INTO "old_queues" VALUES(6,NULL,NULL,NULL,1,'2024-05-31 06:09:41.235000',NULL,'2024-05-31 06:09:42.298000',NULL,NULL,1,0,'','parcel.lost',NULL,'01a1e820-1d73-75a6-827e-c0a075a1a0f2',NULL,'application/json',NULL,NULL,'2026-11-17 06:09:41Z unroutable: no queue is bound to ''parcel.lost''
',X'22756E726F757461626C6522');
INSERT INTO "old_queues" VALUES(7,NULL,'2024-05-31 07:09:41.454000','3e0c2804586b45119ce5388af4286a51',0,'2024-05-31 06:09:41.216000',NULL,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.281000',0,1,'billing','order.created','customer 7','01a1e820-1d5f-75b4-9325-b47ce2d21de0',NULL,'application/json',NULL,NULL,NULL,X'226C656173656422');
INSERT INTO "old_queues" VALUES(8,NULL,NULL,NULL,0,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.231000',NULL,'2024-05-31 06:09:41.281000',0,0,'billing','order.created','customer 7','01a1e820-1d6f-70b8-b562-23e6aa343d98',NULL,'application/json',NULL,NULL,NULL,X'22726F7574656422');
INSERT INTO "old_queues" VALUES(9,NULL,NULL,NULL,0,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 07:09:41.348000','2024-05-31 06:09:41.232000','2024-05-31 06:09:41.281000',1,1,'billing','order.created','customer 7','01a1e820-1d6f-7594-9430-0582bdc98ccc',NULL,'application/json',NULL,NULL,'2026-11-17 06:09:41Z attempt 1 failed: OSError: away
',X'227265747279696E6722');
INSERT INTO "old_queues" VALUES(10,'2024-05-31 06:09:41.341000',NULL,NULL,0,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.281000',1,1,'billing','order.created','customer 7','01a1e820-1d70-7721-86db-ead41cdbb121',NULL,'application/json',NULL,NULL,NULL,X'22646F6E6522');
INSERT INTO "old_queues" VALUES(12,'2024-05-31 06:09:41.440000',NULL,NULL,0,'2024-05-31 06:09:41.427000',NULL,'2024-05-31 06:09:41.435000',NULL,'2024-05-31 06:09:41.435000',1,1,'billing','order.created',NULL,'received-1',NULL,'application/json',NULL,NULL,NULL,X'22726563656976656422');
INSERT INTO "old_queues" VALUES(13,NULL,NULL,NULL,0,'2024-05-31 06:09:41.444000',NULL,'2024-05-31 06:09:41.444000',NULL,NULL,0,0,'','order.created',NULL,'01a1e820-1e43-7013-a209-121c817d876f',NULL,'application/json',NULL,'{"tenant": "acme"}',NULL,X'2277616974696E6722');
INSERT INTO "old_queues" VALUES(14,NULL,NULL,NULL,0,'2024-05-31 06:09:41.446000',NULL,'2024-05-31 07:09:41.447000',NULL,NULL,0,0,'','order.created',NULL,'01a1e820-1e45-7f85-96a2-e0601b47c4df','a timer','application/json',NULL,NULL,NULL,X'2274696D657222');
INSERT INTO "old_queues" VALUES(15,NULL,NULL,NULL,0,'2024-05-31 06:09:41.450000','2024-05-31 07:09:41.450000','2024-05-31 06:09:41.450000',NULL,NULL,0,0,'','order.created',NULL,'01a1e820-1e49-7c48-a6a1-42d98558172a',NULL,'application/json',NULL,NULL,NULL,X'226578706972656422');
CREATE TABLE old_queues_bindings (
	queue VARCHAR(255) NOT NULL, 
	binding_key VARCHAR(255) NOT NULL, 
	PRIMARY KEY (queue, binding_key)
);
INSERT INTO "old_queues_bindings" VALUES('billing','order.created');
INSERT INTO "old_queues_bindings" VALUES('audit','order.#');
CREATE TABLE old_queues_circuits (
	destination VARCHAR(255) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	failures INTEGER NOT NULL, 
	paused_until DATETIME, 
	error TEXT NOT NULL, 
	refusing_since DATETIME, 
	PRIMARY KEY (destination)
);
CREATE TABLE old_queues_dead_letters (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	died_at DATETIME NOT NULL, 
	reason VARCHAR(32) NOT NULL, 
	error TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	due_at DATETIME NOT NULL, 
	first_due_at DATETIME, 
	routed_at DATETIME, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	starts INTEGER DEFAULT '0' NOT NULL, 
	destination VARCHAR(255) DEFAULT '' NOT NULL, 
	routing_key VARCHAR(255) NOT NULL, 
	"key" VARCHAR(255), 
	message_id VARCHAR(255) NOT NULL, 
	timer_id VARCHAR(255), 
	content_type VARCHAR(255) NOT NULL, 
	tracking_ids TEXT, 
	headers TEXT, 
	history TEXT, 
	body BLOB NOT NULL
);
INSERT INTO "old_queues_dead_letters" VALUES(1,'2024-05-31 06:09:41.386000','rejected','Reject: no such order','2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.232000',NULL,'2024-05-31 06:09:41.281000',1,1,'billing','order.created','customer 7','01a1e820-1d70-7715-afe2-ce4cad176102',NULL,'application/json',NULL,NULL,'2026-11-17 06:09:41Z attempt 1 was the last, rejected: Reject: no such order
',X'226465616422');
CREATE TABLE old_queues_inbox (
	queue VARCHAR(255) NOT NULL, 
	message_id VARCHAR(255) NOT NULL, 
	entered_at DATETIME NOT NULL, 
	PRIMARY KEY (queue, message_id)
);
INSERT INTO "old_queues_inbox" VALUES('billing','received-1','2024-05-31 06:09:41.433000');
CREATE TABLE old_queues_owners (
	queue VARCHAR(255) NOT NULL, 
	owner TEXT NOT NULL, 
	PRIMARY KEY (queue)
);
INSERT INTO "old_queues_owners" VALUES('audit','shop');
INSERT INTO "old_queues_owners" VALUES('billing','shop');
CREATE TABLE old_queues_state (
	id INTEGER NOT NULL, 
	transport VARCHAR(64), 
	bindings_version BIGINT NOT NULL, 
	asleep_until DATETIME, 
	PRIMARY KEY (id)
);
INSERT INTO "old_queues_state" VALUES(1,'database',133608019,NULL);
CREATE TABLE old_relay (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	done_at DATETIME, 
	lease_until DATETIME, 
	lease_token CHAR(32), 
	unroutable BOOLEAN DEFAULT 0 NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	due_at DATETIME NOT NULL, 
	first_due_at DATETIME, 
	routed_at DATETIME, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	starts INTEGER DEFAULT '0' NOT NULL, 
	destination VARCHAR(255) DEFAULT '' NOT NULL, 
	routing_key VARCHAR(255) NOT NULL, 
	"key" VARCHAR(255), 
	message_id VARCHAR(255) NOT NULL, 
	timer_id VARCHAR(255), 
	content_type VARCHAR(255) NOT NULL, 
	tracking_ids TEXT, 
	headers TEXT, 
	history TEXT, 
	body BLOB NOT NULL
);
INSERT INTO "old_relay" VALUES(1,NULL,'2024-05-31 07:09:41.721000','7557be372cbb4d198457cfaa95d9ca3e',0,'2024-05-31 06:09:41.555000',NULL,'2024-05-31 06:09:41.575000',NULL,NULL,0,1,'','order.created',NULL,'01a1e820-1eb3-7d14-9711-7a849968d5af',NULL,'application/json',NULL,NULL,NULL,X'226C656173656422');
INSERT INTO "old_relay" VALUES(2,NULL,NULL,NULL,0,'2024-05-31 06:09:41.576000',NULL,'2024-05-31 07:09:41.658000','2024-05-31 06:09:41.578000',NULL,1,1,'','order.created',NULL,'01a1e820-1ec7-7378-ae51-de28e171b82f',NULL,'application/json',NULL,NULL,'2026-11-17 06:09:41Z attempt 1 failed: 503
',X'227265747279696E6722');
INSERT INTO "old_relay" VALUES(3,'2024-05-31 06:09:41.636000',NULL,NULL,0,'2024-05-31 06:09:41.578000',NULL,'2024-05-31 06:09:41.578000',NULL,NULL,1,1,'','order.created',NULL,'01a1e820-1eca-757b-bced-06dcf390bdcb',NULL,'application/json',NULL,NULL,NULL,X'22646F6E6522');
INSERT INTO "old_relay" VALUES(5,NULL,NULL,NULL,0,'2024-05-31 06:09:41.707000',NULL,'2024-05-31 06:09:41.711000',NULL,NULL,0,0,'','order.created','customer 7','01a1e820-1f4a-7f55-9194-cfe56430a3ea',NULL,'application/json',NULL,NULL,NULL,X'2277616974696E6722');
CREATE TABLE old_relay_bindings (
	queue VARCHAR(255) NOT NULL, 
	binding_key VARCHAR(255) NOT NULL, 
	PRIMARY KEY (queue, binding_key)
);
CREATE TABLE old_relay_circuits (
	destination VARCHAR(255) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	failures INTEGER NOT NULL, 
	paused_until DATETIME, 
	error TEXT NOT NULL, 
	refusing_since DATETIME, 
	PRIMARY KEY (destination)
);
INSERT INTO "old_relay_circuits" VALUES('','open',1,'2024-05-31 07:09:41.717000','ConnectionRefusedError: nothing listens there',NULL);
CREATE TABLE old_relay_dead_letters (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	died_at DATETIME NOT NULL, 
	reason VARCHAR(32) NOT NULL, 
	error TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	due_at DATETIME NOT NULL, 
	first_due_at DATETIME, 
	routed_at DATETIME, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	starts INTEGER DEFAULT '0' NOT NULL, 
	destination VARCHAR(255) DEFAULT '' NOT NULL, 
	routing_key VARCHAR(255) NOT NULL, 
	"key" VARCHAR(255), 
	message_id VARCHAR(255) NOT NULL, 
	timer_id VARCHAR(255), 
	content_type VARCHAR(255) NOT NULL, 
	tracking_ids TEXT, 
	headers TEXT, 
	history TEXT, 
	body BLOB NOT NULL
);
INSERT INTO "old_relay_dead_letters" VALUES(1,'2024-05-31 06:09:41.696000','refused','400 no such order','2024-05-31 06:09:41.579000',NULL,'2024-05-31 06:09:41.584000',NULL,NULL,1,1,'','order.created',NULL,'01a1e820-1ecb-7051-b13f-d57bedc35f29',NULL,'application/json',NULL,NULL,'2026-11-17 06:09:41Z attempt 1 was the last, refused: 400 no such order
',X'226465616422');
CREATE TABLE old_relay_inbox (
	queue VARCHAR(255) NOT NULL, 
	message_id VARCHAR(255) NOT NULL, 
	entered_at DATETIME NOT NULL, 
	PRIMARY KEY (queue, message_id)
);
CREATE TABLE old_relay_owners (
	queue VARCHAR(255) NOT NULL, 
	owner TEXT NOT NULL, 
	PRIMARY KEY (queue)
);
CREATE TABLE old_relay_state (
	id INTEGER NOT NULL, 
	transport VARCHAR(64), 
	bindings_version BIGINT NOT NULL, 
	asleep_until DATETIME, 
	PRIMARY KEY (id)
);
INSERT INTO "old_relay_state" VALUES(1,'http',0,NULL);
CREATE INDEX old_queues_claim ON old_queues (destination, due_at, id) WHERE done_at IS NULL;
CREATE INDEX old_queues_done ON old_queues (done_at) WHERE done_at IS NOT NULL;
CREATE INDEX old_queues_unroutable ON old_queues (id) WHERE unroutable;
CREATE UNIQUE INDEX old_queues_timer ON old_queues (timer_id) WHERE timer_id IS NOT NULL AND destination = '' AND done_at IS NULL;
CREATE INDEX old_queues_expiry ON old_queues (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX old_queues_dead_letters_queue ON old_queues_dead_letters (destination, id);
CREATE INDEX old_queues_inbox_entered ON old_queues_inbox (entered_at);
CREATE INDEX old_relay_unroutable ON old_relay (id) WHERE unroutable;
CREATE UNIQUE INDEX old_relay_timer ON old_relay (timer_id) WHERE timer_id IS NOT NULL AND destination = '' AND done_at IS NULL;
CREATE INDEX old_relay_claim ON old_relay (destination, due_at, id) WHERE done_at IS NULL;
CREATE INDEX old_relay_expiry ON old_relay (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX old_relay_done ON old_relay (done_at) WHERE done_at IS NOT NULL;
CREATE INDEX old_relay_dead_letters_queue ON old_relay_dead_letters (destination, id);
CREATE INDEX old_relay_inbox_entered ON old_relay_inbox (entered_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('old_queues',15);
INSERT INTO "sqlite_sequence" VALUES('old_queues_dead_letters',1);
INSERT INTO "sqlite_sequence" VALUES('old_relay',5);
INSERT INTO "sqlite_sequence" VALUES('old_relay_dead_letters',1);
COMMIT;
